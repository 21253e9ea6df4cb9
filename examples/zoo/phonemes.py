"""How English words are spoken: the network of the package g2p-en (Apache 2.0).

    python phonemes.py recurrence scanl

Needs `pip install --no-deps g2p-en`. The package looks known words up; this is its guess for every word. An encoder
reads the letters at once; the decoder is a stream that begins with the encoder's state.
"""

import argparse
from string import ascii_lowercase

import numpy as np
import torch
from packages import packaged
from torch import Tensor, nn

from scanl import hub

WIDTH, LONGEST = 256, 20  # of the state; phonemes of a word
LETTERS = {letter: number for number, letter in enumerate(["<pad>", "<unk>", "</s>", *ascii_lowercase])}
VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH"
PHONEMES = sorted([*CONSONANTS.split(), "UW", *(vowel + stress for vowel in VOWELS for stress in "012")])
FIRST, LAST = 2, 3  # numbers of the marks of a word's beginning and end
NAMES = ["<pad>", "<unk>", "<s>", "</s>", *PHONEMES]


class Encoder(nn.Module):
    """The state (1, B, 256) after letters (B, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, letters: Tensor) -> Tensor:
        return self.gru(self.embedding(letters))[1]


class Decoder(nn.Module):
    """The next phoneme after each one (B, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(NAMES), WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.output = nn.Linear(WIDTH, len(NAMES))

    def forward(self, phonemes: Tensor) -> Tensor:
        return self.output(self.gru(self.embedding(phonemes))[0]).argmax(-1)


class Phonemizer:
    """Phonemes of words."""

    def __init__(self) -> None:
        weights = np.load(packaged("g2p_en", "checkpoint20.npz", "g2p-en"), allow_pickle=False)
        self.encoder = _filled(Encoder(), weights, "enc")
        hub.accelerate(self.encoder)
        self.decoder = hub.convert(_filled(Decoder(), weights, "dec"))

    def __call__(self, word: str) -> list[str]:
        letters = [LETTERS.get(letter, LETTERS["<unk>"]) for letter in word] + [LETTERS["</s>"]]
        phoneme, found = torch.tensor([[FIRST]]), []
        with torch.inference_mode():
            state = {"gru.h": self.encoder(torch.tensor([letters])).transpose(0, 1)}
            for _ in range(LONGEST):
                phoneme, state = self.decoder(phoneme, state)
                number = int(phoneme)
                if number == LAST:
                    break
                found.append(NAMES[number])
        return found


def _filled(module: nn.Module, weights: np.lib.npyio.NpzFile, part: str) -> nn.Module:
    """Fill a module with the arrays of one part of the file."""
    names = {"embedding.weight": f"{part}_emb", "output.weight": "fc_w", "output.bias": "fc_b"}
    names |= {f"gru.{kind}_l0": f"{part}_{short}" for kind, short in _SHORT.items()}
    module.load_state_dict({name: torch.from_numpy(weights[names[name]]) for name in module.state_dict()})
    return module.eval()


_SHORT = {"weight_ih": "w_ih", "weight_hh": "w_hh", "bias_ih": "b_ih", "bias_hh": "b_hh"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=["recurrence"])
    phonemize = Phonemizer()
    for word in parser.parse_args().words:
        print(word, *phonemize(word.lower()))


if __name__ == "__main__":
    main()

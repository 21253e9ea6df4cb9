"""Text character by character: the network of the package textgenrnn (MIT), trained on titles of Reddit.

    python characters.py "What is the"

Needs `pip download --no-deps --no-binary :all: textgenrnn`, unpacked (it is no wheel), its folder in PYTHONPATH, and
h5py, which reads the weights; no TensorFlow. The network reads the last 40 characters anew for each further one.
"""

import argparse
import json

import h5py
import torch
from packages import packaged
from torch import Tensor, nn

from scanl import hub

LENGTH, HIDDEN, WIDTH = 40, 128, 100  # characters that are read, widths of the state and of a character
START = "<s>"  # of a text, and its end


class CharacterNetwork(nn.Module):
    """Probabilities of the next character (B, V) after 40 characters (B, 40)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.first = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.second = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.attention = nn.Linear(WIDTH + 2 * HIDDEN, 1, bias=False)
        self.output = nn.Linear(WIDTH + 2 * HIDDEN, characters)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x)
        first = self.first(embedded)[0]
        steps = torch.cat([embedded, first, self.second(first)[0]], -1)
        weights = self.attention(steps).softmax(1)
        return self.output((weights.mT @ steps)[:, 0]).softmax(-1)


def read() -> tuple[CharacterNetwork, dict[str, int]]:
    """Return the network with the weights of the package, and the number of each character."""
    file = packaged("textgenrnn", "textgenrnn_weights.hdf5", "textgenrnn")
    numbers = json.loads(file.with_name("textgenrnn_vocab.json").read_text(encoding="utf-8"))
    with h5py.File(file) as weights:

        def array(layer: str, name: str):
            return weights[f"{layer}/{layer}/{name}:0"][()]

        state = {
            "embedding.weight": torch.from_numpy(array("embedding", "embeddings")),
            "attention.weight": torch.from_numpy(array("attention", "attention_W").T),
            "output.weight": torch.from_numpy(array("output", "kernel").T),
            "output.bias": torch.from_numpy(array("output", "bias")),
        }
        for name, layer in (("first", "rnn_1"), ("second", "rnn_2")):
            arrays = [array(layer, part) for part in ("kernel", "recurrent_kernel", "bias")]
            found = hub.keras_weights("LSTM", *arrays, cudnn=True)
            state |= {f"{name}.{weight}_l0": tensor for weight, tensor in found.items()}
    network = CharacterNetwork(len(state["output.bias"]))
    network.load_state_dict(state)
    hub.accelerate(network)
    return network.eval(), numbers


def encoded(text: list[str], numbers: dict[str, int]) -> Tensor:
    """Return the last 40 characters as numbers (1, 40), after zeros."""
    tokens = [numbers.get(character, 0) for character in text[-LENGTH:]]
    return torch.tensor([[0] * (LENGTH - len(tokens)) + tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="")
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--length", type=int, default=100, help="of the text in characters, at most")
    options = parser.parse_args()
    network, numbers = read()
    characters = {number: character for character, number in numbers.items()}
    text = [START, *options.text]
    with torch.inference_mode():
        while len(text) <= options.length and (len(text) == 1 or text[-1] != START):
            logits = network(encoded(text, numbers))[0].log() / options.temperature
            text.append(characters[int(logits[1:].softmax(0).multinomial(1)) + 1])
    print("".join(text[1:]).removesuffix(START))


if __name__ == "__main__":
    main()

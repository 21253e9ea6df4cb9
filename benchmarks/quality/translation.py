"""Translation of Bible verses from English to Spanish, by BLEU: encoders and decoders beside naive answers.

    python benchmarks/quality/translation.py [NAME ...] [--minutes 8] [--dim 128]

Needs `scanl data get verses` and `pip install 'scanl[bleu]'`. Pairs of at most `LONGEST` bytes a side are read, as
`SUBWORDS` subwords that are learned from every fourth training pair. All models train for the same minutes by the
clock with Adam, so their number of steps depends on the load; `processor` has the seconds of the processor. The answer
is found greedily for the first `TESTED` test verses of that length, and scored by sacrebleu with its defaults.

Naive answers: `copy`, the English verse; `most frequent`, the Spanish verse that the training part has most often;
`nearest`, the translation of the training verse that shares the greatest part of its words with the verse.
The rows are in benchmarks/results/translation.csv.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.data.published.translation import Pairs, Verses
from scanl.models import AttentiveRecurrence, Columns, EncoderDecoder, Stack, Tokens, TransformerEncoder

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from subwords import Subwords, learn_subwords

LONGEST, SUBWORDS, TESTED, BATCH = 100, 800, 300, 48
NAIVE = ("copy", "most frequent", "nearest")


def recurrent(dim: int) -> Stack:
    return Stack(dim, 1, "bidirectional", layer_options={"layer": "lstm"}, channel_mixer="none")


def lstm(dim: int) -> Stack:
    return Stack(dim, 2, "lstm", channel_mixer="none")


MODELS = {
    "lstm": lambda v, d: EncoderDecoder(v, recurrent(d), lstm(d), Tokens(v), attention="first"),
    "best of both": lambda v, d: EncoderDecoder(
        v, Columns([TransformerEncoder(d, 1), recurrent(d)]), lstm(d), Tokens(v), attention="first"
    ),
    "arn": lambda v, d: EncoderDecoder(
        v, recurrent(d), lstm(d), Tokens(v), attention="first", recurrence=AttentiveRecurrence(d)
    ),
}


def rows(texts: Sequence[str], subwords: Subwords) -> tuple[Tensor, Tensor]:
    """Return the tokens (N, T) of texts, zeros after their ends, and the mask of the tokens."""
    tokens = [torch.tensor(subwords.encode(text)) for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return padded, torch.arange(padded.shape[1]) < torch.tensor([len(each) for each in tokens])[:, None]


def train(model: EncoderDecoder, pairs: Pairs, subwords: Subwords, minutes: float, seed: int) -> tuple[int, float]:
    """Train for some minutes by the clock. Return the steps and the mean loss of the last tenth, in nats a token."""
    random, losses = torch.Generator().manual_seed(seed), []
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, betas=(0.9, 0.98))
    begin, share = time.perf_counter(), 0.0
    while share < 1:
        some = [pairs[i] for i in torch.randint(len(pairs), (8 * BATCH,), generator=random)]
        some.sort(key=lambda pair: len(pair[1]))  # rows of a batch are about as long as each other
        for at in torch.randperm(8, generator=random).tolist():
            batch = some[at * BATCH : (at + 1) * BATCH]
            (source, mask), (target, present) = (rows(side, subwords) for side in zip(*batch, strict=True))
            share = min(1.0, (time.perf_counter() - begin) / (60 * minutes))
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (len(losses) + 1) / 50, 2 * (1 - share) + 0.02)
            logits, _ = model(source, F.pad(target, (1, 0)), mask=mask)
            ends = F.pad(present, (1, 0), value=True)  # the token after the last is 0, the end
            loss = F.cross_entropy(logits[ends], F.pad(target, (0, 1))[ends])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if share >= 1:
                break
    late = losses[-max(1, len(losses) // 10) :]
    return len(losses), sum(late) / len(late)


def translated(model: EncoderDecoder, texts: Sequence[str], subwords: Subwords) -> list[str]:
    model.eval()
    answers = []
    for at in range(0, len(texts), 100):
        source, mask = rows(texts[at : at + 100], subwords)
        tokens, _ = model.generate(source, mask=mask, max_new_tokens=2 * source.shape[1])
        answers += [subwords.decode(token for token in row if token) for row in tokens.tolist()]
    return answers


def naive(name: str, pairs: Pairs, texts: Sequence[str]) -> list[str]:
    if name == "copy":
        return list(texts)
    if name == "most frequent":
        return [Counter(second for _, second in pairs).most_common(1)[0][0]] * len(texts)
    words = [(set(first.lower().split()), second) for first, second in pairs]
    sets = [set(text.lower().split()) for text in texts]
    return [max(words, key=lambda each: len(asked & each[0]) / len(asked | each[0]))[1] for asked in sets]


def bleu(answers: Sequence[str], *references: Sequence[str]) -> float:
    """Return the BLEU of answers, in percent. references: lists of right answers, each as long as `answers`."""
    from sacrebleu import corpus_bleu

    return corpus_bleu(list(answers), [list(each) for each in references]).score


def short(pairs: Pairs) -> Pairs:
    return [pair for pair in pairs if max(len(side.encode()) for side in pair) <= LONGEST]


def main() -> None:
    made = parser(__doc__, [*NAIVE, *MODELS], seeds=True)
    made.add_argument("--minutes", type=float, default=8.0, help="of training, by the clock")
    made.add_argument("--dim", type=int, default=128)
    options = parse(made)
    if options.quick:
        options.minutes, options.dim = 0.01, 16
    results = Results("translation", options)
    pairs, _, test = map(short, Verses(seed=0).pairs())
    test = test[: 10 if options.quick else TESTED]
    texts, references = (list(side) for side in zip(*test, strict=True))
    subwords = None
    for seed in range(options.seeds):
        for name in options.names:
            key = {"program": name} if name in NAIVE else {"program": name, "seed": seed, "minutes": options.minutes}
            if results.has(**key):
                continue
            if name in NAIVE:
                results.add(**key, bleu=bleu(naive(name, pairs, texts), references))
                continue
            if subwords is None:
                subwords = learn_subwords((side for pair in pairs[::4] for side in pair), SUBWORDS)
            torch.manual_seed(seed)
            model = MODELS[name](len(subwords), options.dim)
            begin = time.process_time()
            steps, loss = train(model, pairs, subwords, options.minutes, seed)
            used = time.process_time() - begin
            answers = translated(model, texts, subwords)
            results.add(
                **key, dim=options.dim, parameters=sum(p.numel() for p in model.parameters()), steps=steps, nats=loss,
                bleu=bleu(answers, references), processor=used, example=f"{texts[0]} | {answers[0]}",
            )  # fmt: skip


if __name__ == "__main__":
    main()

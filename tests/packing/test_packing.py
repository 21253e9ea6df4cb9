"""What is packed comes back whole, whatever it is, and a damaged archive is refused by one line."""

import io
import lzma
import random

import pytest
import torch
from torch.nn import functional as F

from scanl.errors import ConfigError, DataError, ScanlError
from scanl.models import LanguageModel, Stack
from scanl.packing import Archive, ContextsAlone, Predictor, pack, pack_pieces, unpack, unpack_file
from scanl.packing.adaptive import AdaptivePredictor
from scanl.packing.archive import HEADER

COVERS = ["packing/*"]
TEXT = b"".join(b"%d is a number, and so is %d; the next one is larger.\n" % (n, n + 1) for n in range(400))


def learnt(layer: str) -> LanguageModel:
    """Return a small model that has learnt a bit of TEXT."""
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(32, 1, layer, channel_mixer="none"))
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    symbols = torch.tensor(list(TEXT[:2080])).view(16, 130)
    for _ in range(20):
        loss = F.cross_entropy(model(symbols[:, :-1])[0].flatten(0, 1), symbols[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def model() -> Predictor:
    return Predictor(learnt("mingru"))


def some(draws: random.Random) -> bytes:
    """Return bytes of one of the kinds that files have."""
    size = draws.choice([0, 1, 2, 255, draws.randrange(9000)])
    kinds = (
        draws.randbytes(size), bytes(range(256)) * (size // 256), bytes([draws.randrange(256)]) * size,
        TEXT[:size], ("Grüße, 世界! " * size)[:size].encode(), TEXT[: size // 2] + draws.randbytes(size // 2),
    )  # fmt: skip
    return draws.choice(kinds)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 300))])
def test_bytes_come_back_whole(model: Predictor, seed: int) -> None:
    draws = random.Random(seed)
    data, streams, frame = some(draws), draws.randint(1, 16), draws.choice([1, 100, 4096, 1 << 20])
    data = data if frame > 1 else data[:20]
    cuts = sorted(draws.choices(range(len(data) + 1), k=draws.randint(0, 5)))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    archive = pack(data, model, streams=streams, frame=frame, threads=draws.randint(1, 2))
    assert b"".join(pack_pieces(pieces, model, streams=streams, frame=frame)) == archive
    assert unpack(archive, model, threads=draws.randint(1, 2)) == data
    begin, end = sorted(draws.choices(range(len(data) + 1), k=2))
    assert Archive(io.BytesIO(archive), model).read(begin, end) == data[begin:end]


def test_a_text_is_packed_within_half_a_percent_of_its_entropy(model: Predictor) -> None:
    archive = pack(TEXT, model, streams=2)
    symbols = torch.tensor(list(TEXT)).view(2, -1)
    inputs = torch.cat([torch.zeros_like(symbols[:, :1]), symbols[:, :-1]], 1)
    with torch.no_grad():
        logits, _ = model.model(inputs)
    entropy = float(F.cross_entropy(logits.flatten(0, 1).double(), symbols.flatten(), reduction="sum")) / torch.log(
        torch.tensor(2.0)
    )
    assert 8 * len(archive) < 1.005 * entropy + 8 * 120  # beside header, index and checks
    assert len(archive) < 0.7 * len(TEXT)


def test_what_repeats_is_shorter_than_by_xz(model: Predictor) -> None:
    draws = random.Random(2)
    words = [draws.randbytes(draws.randint(2, 9)) for _ in range(50)]
    data = b"".join(draws.choice(words) for _ in range(3000)) + 5000 * b"a"
    for predictor in (model, ContextsAlone()):
        archive = pack(data, predictor)
        assert len(archive) < len(lzma.compress(data))
        assert unpack(archive, predictor) == data


def test_noise_is_stored(model: Predictor) -> None:
    noise = random.Random(0).randbytes(130_000)
    assert len(pack(noise, model)) <= 1.001 * len(noise)


def test_a_pipe_is_read_from_its_beginning(model: Predictor) -> None:
    class Pipe(io.BytesIO):
        """Returns a few bytes at a time, and does not seek."""

        def read(self, size: int | None = -1) -> bytes:
            return super().read(7 if size is None or size < 0 else min(size, 7))

        def seek(self, *place: int) -> int:
            raise OSError

    archive = pack(TEXT, model, frame=8000)
    assert b"".join(unpack_file(Pipe(archive), model)) == TEXT


@pytest.mark.parametrize("begin", [False, True])
def test_an_archive_goes_on_where_it_was_cut(model: Predictor, begin: bool) -> None:
    coded: list[int] = []
    archive = pack(TEXT, model, frame=8000, moved=coded.append)
    assert sum(coded) == len(TEXT)
    for cut in (HEADER - 1, HEADER, 2 * len(archive) // 3, len(archive)):
        again = b"".join(pack_pieces([TEXT], model, frame=8000, earlier=io.BytesIO(archive[:cut])))
        assert again == archive
    changed = bytes(2) + TEXT[2:] if begin else TEXT[:-2] + bytes(2)
    again = b"".join(pack_pieces([changed], model, frame=8000, earlier=io.BytesIO(archive)))
    assert again == pack(changed, model, frame=8000)


def test_a_flipped_bit_is_refused(model: Predictor) -> None:
    draws = random.Random(1)
    archive = pack(draws.randbytes(500) + TEXT[:100], model, frame=400)
    for place in {
        *range(HEADER + 20),
        *draws.sample(range(len(archive)), 200),
        *range(len(archive) - 80, len(archive)),
    }:
        broken = bytearray(archive)
        broken[place] ^= 1 << draws.randrange(8)
        with pytest.raises(DataError) as caught:
            unpack(bytes(broken), model)
        assert "\n" not in str(caught.value)
    for size in draws.sample(range(len(archive)), 30):
        with pytest.raises(DataError):
            unpack(archive[:size], model)
        with pytest.raises(DataError):
            Archive(io.BytesIO(archive[:size]), model).read()
    with pytest.raises(DataError, match="the end is damaged"):
        unpack(archive + b"\0", model)


def test_a_model_learns_alike_on_both_sides(model: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    learners: list[AdaptivePredictor] = []
    made = AdaptivePredictor.__init__
    monkeypatch.setattr(
        AdaptivePredictor, "__init__", lambda self, *args: (learners.append(self), made(self, *args))[1]
    )
    data = TEXT[:2000] + random.Random(0).randbytes(1000) + TEXT[2000:3000]
    archive = pack(data, model, learn=True, frame=1000)
    assert len(archive) < len(pack(data, model, frame=1000))
    assert unpack(archive, model, threads=2) == data
    one, other = (learner.saved() for learner in learners)
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    with pytest.raises(ConfigError, match="packed with --learn, so it is read from its beginning"):
        Archive(io.BytesIO(archive), model).read(0, 1)


def test_other_models_and_options_are_refused(model: Predictor) -> None:
    archive = pack(TEXT[:100], model)
    with pytest.raises(DataError, match=r"packed by the model \w{32} \(int8|float32, portable\), but this is"):
        unpack(archive, Predictor(LanguageModel(256, Stack(32, 1, "mingru"))))
    with pytest.raises(ConfigError, match="model has vocab_size=100, expected 256"):
        Predictor(LanguageModel(100, Stack(32, 1, "mingru")))
    for options in ({"streams": 0}, {"frame": 0}, {"threads": 0}):
        with pytest.raises(ScanlError, match=f"packing: {next(iter(options))} is 0, expected 1 to"):
            pack(TEXT, model, **options)


def test_a_model_that_no_kernel_runs_packs_by_exact_steps() -> None:
    model = Predictor(learnt("s5"))
    assert model.arithmetic == "exact"
    archive = pack(TEXT[:1000], model)
    assert len(archive) < 900
    assert unpack(archive, model) == TEXT[:1000]

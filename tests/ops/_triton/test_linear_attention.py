"""Linear attention in chunks on triton beyond the laws of all ops: off the chunks and blocks, packed, at -inf."""

import pytest
import torch

import laws
from scanl.errors import BackendError
from scanl.ops import linear_attention
from scanl.ops.registry import OpSample

triton = pytest.importorskip("triton")
from interpreter import each_way  # noqa: E402
from scanl.ops._triton import _recurrent  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DECAYS = {"none": None, "of heads": "H", "of steps": "BTH", "of channels": "BTHK"}
each_decay = pytest.mark.parametrize("decay", DECAYS)


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    """However few the steps, they go through chunks."""
    monkeypatch.setattr(_recurrent, "STEPS", 0)


def draw(decay: str, bonus: bool = False, bounds: list[int] | None = None, **sizes: int) -> OpSample:
    sizes = {"B": 2, "T": 20, "G": 1, "H": 2, "K": 20, "V": 24} | sizes
    if bounds is not None:
        sizes |= {"B": 1, "T": bounds[-1]}

    def random(axes: str) -> torch.Tensor:
        return torch.randn([sizes[axis] for axis in axes], dtype=torch.float64)

    operands = {"q": random("BTGK"), "k": random("BTGK"), "v": random("BTHV")}
    if DECAYS[decay] is not None:
        operands["g"] = -random(DECAYS[decay]).abs()
    if bonus:
        operands["u"] = random("HK")
    rows = sizes["B"] if bounds is None else len(bounds) - 1
    operands["state"] = torch.randn(rows, sizes["H"], sizes["K"], sizes["V"], dtype=torch.float64)
    return OpSample(operands, {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)})


def truth(sample: OpSample, reverse: bool = False, dtype: torch.dtype = torch.float32) -> None:
    laws.truth(linear_attention, sample, {"reverse": reverse}, "triton", dtype)


@each_way("decay", DECAYS)
def test_off_the_chunks_and_blocks(decay, reverse):
    """37 steps in chunks of 16; 20 and 24 channels in blocks of 16; two heads of values for a key."""
    truth(draw(decay, T=37), reverse)


@each_way("decay", DECAYS, first=True)
def test_bonus(decay, reverse):
    truth(draw(decay, bonus=True, B=1, G=2), reverse)


@each_decay
@pytest.mark.parametrize("bonus", [pytest.param(False, marks=pytest.mark.long), True], ids=["", "bonus"])
def test_half_precision(decay, bonus):
    truth(draw(decay, bonus, B=1), dtype=torch.float16)


@pytest.mark.parametrize("steps", [1, 15, 16, 17, 32])
def test_at_the_borders_of_chunks(steps):
    truth(draw("of channels", B=1, H=1, T=steps, K=3, V=2))


@each_way("decay", ["of steps", "of channels"])
@pytest.mark.parametrize("bonus", [pytest.param(False, marks=pytest.mark.long), True], ids=["", "bonus"])
def test_packed(decay, reverse, bonus):
    """Empty sequences, first, last and between; borders on those of chunks and off them."""
    truth(draw(decay, bonus, [0, 0, 4, 16, 16, 33, 34, 34], K=3, V=2), reverse)


def test_packed_sequences_of_no_steps():
    sample = draw("of steps", bounds=[0, 0, 0])
    o, last = linear_attention(**sample.operands, **sample.options, backend="triton")
    assert o.shape == (1, 0, 2, 24)
    assert torch.equal(last, sample.operands["state"])


@each_way("decay", ["of steps", "of channels"], first=True)
@pytest.mark.parametrize("bonus", [False, True], ids=["", "bonus"])
def test_forgets_at_every_place_of_a_chunk(decay, bonus, reverse):
    """Decays of -inf and next to none side by side: values and every gradient, against the reference in float64."""
    sample = draw(decay, bonus, K=3, V=2)
    g = sample.operands["g"]
    g *= 1e-3
    g[torch.rand(g.shape, dtype=torch.float64) < 0.2] = -torch.inf
    operands = laws.at(linear_attention, sample, torch.float64, "triton")
    exact, ours = (laws.evaluate(linear_attention, operands, {"reverse": reverse}, b) for b in ("reference", "triton"))
    for name, value in exact.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", ["of steps", "of channels"])
def test_gradients_of_strong_decays(decay):
    """They are e^-9 of what is read and written at the step itself, in whose rounding they must not drown."""
    sample = draw(decay, B=1, K=3, V=2)
    sample.operands["g"].sub_(9)
    truth(sample)


@pytest.mark.parametrize("decay", ["of steps", "of channels"])
def test_small_decays_after_a_large_one(decay):
    """A difference of sums would lose them."""
    sample = draw(decay, B=1, H=1, K=3, V=2)
    sample.operands["g"].mul_(1e-3)
    sample.operands["g"][:, 3] = -1e6
    truth(sample)


def test_strided_and_expanded():
    sample = draw("of channels")
    operands = {name: value.float() for name, value in sample.operands.items()}
    operands["q"] = operands["q"].transpose(1, 3).contiguous().transpose(1, 3)
    operands["g"] = operands["g"][:1, :, :, :1].expand(2, -1, -1, 20)
    operands["state"] = operands["state"][:1].expand(2, -1, -1, -1)
    ours, plain = (linear_attention(**operands, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"K": 0}, {"V": 0}, {"H": 0, "G": 0}], ids=str)
def test_empty(sizes):
    sample = draw("of channels", bonus=True, **sizes)
    leaves = {name: value.requires_grad_() for name, value in sample.operands.items()}
    o, last = linear_attention(**leaves, backend="triton")
    gradients = torch.autograd.grad(o.sum() + last.sum(), list(leaves.values()))
    assert torch.equal(last, leaves["state"])
    assert not o.any()
    assert [g.shape for g in gradients] == [leaf.shape for leaf in leaves.values()]
    assert (gradients[-1] == 1).all()


def test_says_what_it_cannot():
    wide = draw("none", T=1, K=300, V=260).operands
    with pytest.raises(BackendError, match="K=300 is over 256; V=260 is over 256"):
        linear_attention(**wide, backend="triton")
    plain = draw("none").operands
    with pytest.raises(BackendError, match="gv is given"):
        linear_attention(**plain, gv=-plain["v"].abs(), backend="triton")


@pytest.mark.gpu
@each_decay
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2, 1000, 4, 64, 64), id="64"),
        pytest.param((1, 4096, 2, 128, 128), id="128", marks=pytest.mark.long),
        pytest.param((1, 300, 2, 256, 200), id="256 and 200", marks=pytest.mark.long),
    ],
)
def test_real_sizes(sizes, dtype, decay):
    sample = draw(decay, **dict(zip("BTHKV", sizes, strict=True)))
    sample.operands["k"] /= sizes[3] ** 0.5
    operands = laws.at(linear_attention, sample, dtype, "triton")
    exact = laws.evaluate(linear_attention, laws.wide(operands), {}, "parallel")
    same = laws.evaluate(linear_attention, operands, {}, "parallel")
    ours = laws.evaluate(linear_attention, operands, {}, "triton")
    rounding = laws.worst(same, exact)
    for name in exact:
        laws.close(ours[name], exact[name], rounding, name, laws.coarsest(linear_attention, "triton", dtype))


@pytest.mark.gpu
def test_another_length_compiles_nothing():
    def run(steps: int) -> None:
        operands = draw("of channels", T=steps).operands
        laws.evaluate(linear_attention, {k: v.float() for k, v in operands.items()}, {}, "triton")

    run(100)
    with laws.compiling_nothing():
        for steps in (17, 64, 160, 257):
            run(steps)

"""State space layers against implementations that are not ours, weights copied over by name."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import LRU, LSSL, S4, S4D, S5, Attention, Hyena, Mamba, MinGRU, MinLSTM, WindowAttention
from scanl.layers.parts.polynomial_memory import transition

DIM, T = 16, 23


def agree(ours, theirs, call_ours, call_theirs, rtol, rename=str):
    """Outputs and all gradients, theirs in their own dtype; an error is measured against the largest value."""
    x = torch.randn(2, T, DIM)
    dtypes = [next(module.parameters()).dtype for module in (ours, theirs)]
    inputs = [x.to(dtype).requires_grad_() for dtype in dtypes]
    y, z = call_ours(inputs[0]), call_theirs(inputs[1])
    weight = torch.randn(y.shape)
    for value in (y, z):
        (value * weight.to(value.dtype)).sum().backward()
    named = dict(theirs.named_parameters())
    pairs = [(y, z), (inputs[0].grad, inputs[1].grad)]
    pairs += [(parameter.grad, named[rename(name)].grad) for name, parameter in ours.named_parameters()]
    for found, expected in pairs:
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < rtol, (found.shape, error)


@pytest.mark.parametrize("bias", [False, True])
def test_mamba_of_transformers(bias):
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    config = modeling.MambaConfig(
        hidden_size=DIM, state_size=6, conv_kernel=3, expand=2, time_step_rank=3, use_bias=bias, num_hidden_layers=1
    )
    theirs = modeling.MambaMixer(config, 0).float()
    ours = Mamba(DIM, 6, 3, rank=3, bias=bias).float()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    agree(ours, theirs, lambda x: ours(x)[0], theirs, 1e-5)


def test_mamba_of_mambapy():
    mambapy = pytest.importorskip("mambapy.mamba")
    theirs = mambapy.MambaBlock(mambapy.MambaConfig(DIM, 1, d_state=6, pscan=False))
    ours = Mamba(DIM, 6)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    agree(ours, theirs, lambda x: ours(x)[0], theirs, 1e-5)


@pytest.mark.parametrize("disc", ["zoh", "bilinear"])
def test_s4d_of_scipy(disc):
    """Each pair of eigenvalues as a real system of two states, discretised and run by scipy.signal."""
    signal = pytest.importorskip("scipy.signal")
    ours = S4D(3, 8, discretization=disc).double()
    u = torch.randn(1, 40, 3, dtype=torch.float64)
    read = []
    with torch.no_grad():
        A, C, dt = ours.kernel.system()
        for d in range(3):
            blocks = [torch.stack([torch.stack([v.real, -v.imag]), torch.stack([v.imag, v.real])]) for v in A[d]]
            into = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(4)[:, None]
            out_of = 2 * torch.stack([C[d].real, -C[d].imag], -1).reshape(1, -1)
            system = [v.numpy() for v in (torch.block_diag(*blocks), into, out_of, torch.zeros(1, 1).double())]
            discrete = signal.cont2discrete(tuple(system), dt[d].item(), disc)
            # Theirs reads before it writes, and moves what is read of the input by the bilinear rule into C and D.
            states = torch.zeros(8, 1, dtype=torch.float64)
            step, write = (torch.from_numpy(part) for part in discrete[:2])
            ys = []
            for x in u[0, :, d]:
                states = step @ states + write * x
                ys.append((torch.from_numpy(system[2]) @ states)[0, 0])
            read.append(torch.stack(ys))
        y = torch.stack(read, -1)[None] + u * ours.D
        expected = ours.output_linear(torch.nn.functional.gelu(y).mT).mT
        torch.testing.assert_close(ours(u)[0], expected)


@pytest.mark.parametrize("window", [5, 64])
def test_window_attention_of_recurrent_gemma(window):
    modeling = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    config = modeling.RecurrentGemmaConfig(
        hidden_size=DIM, num_attention_heads=4, num_key_value_heads=2, attention_window_size=window, num_hidden_layers=3
    )
    config._attn_implementation = "eager"
    theirs = modeling.RecurrentGemmaAttention(config, 2)
    ours = WindowAttention(DIM, 4, 2, window=window)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    steps = torch.arange(T)
    age = steps[:, None] - steps
    mask = torch.zeros(1, 1, T, T).masked_fill((age < 0) | (age >= window), -torch.inf)
    agree(ours, theirs, lambda x: ours(x)[0], lambda x: theirs(x, steps[None], mask)[0], 1e-5)


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_of_llama(heads):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = modeling.LlamaConfig(hidden_size=DIM, num_attention_heads=4, num_key_value_heads=heads)
    config._attn_implementation = "eager"
    theirs = modeling.LlamaAttention(config, 0)
    ours = Attention(DIM, 4, heads)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    rotary, steps = modeling.LlamaRotaryEmbedding(config), torch.arange(T)
    mask = torch.zeros(1, 1, T, T).masked_fill(steps[:, None] < steps, -torch.inf)
    agree(ours, theirs, lambda x: ours(x)[0], lambda x: theirs(x, rotary(x, steps[None]), mask)[0], 1e-5)


def test_s4_of_scipy():
    """The full real system of both eigenvalues of each pair, discretised by scipy.signal."""
    signal = pytest.importorskip("scipy.signal")
    ours = S4(3, 8).double()
    u = torch.randn(1, 40, 3, dtype=torch.float64)
    read = []
    with torch.no_grad():
        Lambda, P, B, C, dt = ours.layer.kernel.system()
        for d in range(3):
            turn = torch.tensor([[1, 1], [1j, -1j]], dtype=torch.complex128) / 2**0.5
            turn = torch.kron(turn, torch.eye(4, dtype=torch.float64).to(turn.dtype))
            both = [torch.cat([part[d], part[d].conj()]) for part in (Lambda, P, B, C)]
            A = turn @ (torch.diag(both[0]) - both[1][:, None] * both[1].conj()) @ turn.mH
            into, out_of = turn @ both[2], both[3] @ turn.mH
            assert max(part.imag.abs().max() for part in (A, into, out_of)) < 1e-12
            system = (A.real.numpy(), into.real[:, None].numpy(), out_of.real[None].numpy(), [[0.0]])
            discrete = signal.cont2discrete(system, dt[d].item(), "bilinear")
            states, ys = torch.zeros(8, dtype=torch.float64), []
            for x in u[0, :, d]:
                states = torch.from_numpy(discrete[0]) @ states + torch.from_numpy(discrete[1])[:, 0] * x
                ys.append(out_of.real @ states)
            read.append(torch.stack(ys))
        y = torch.stack(read, -1)[None] + u * ours.layer.D[0]
        torch.testing.assert_close(ours(u)[0], ours.output_linear(torch.nn.functional.gelu(y)))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("steps", [9, 40])
def test_lssl_of_scipy(steps):
    """The system of HiPPO-LegS, discretised and run by scipy.signal."""
    signal = pytest.importorskip("scipy.signal")
    ours, u = LSSL(3, 8), torch.randn(1, steps, 3)
    A, B = transition("legs", 8)
    read = []
    for d in range(3):
        system = (A.numpy(), B[:, None].numpy(), ours.C[d : d + 1].detach().numpy(), [[0.0]])
        into, by, *_ = signal.cont2discrete(system, ours.log_dt[d].exp().item(), "bilinear")
        # Theirs reads before it writes, so the state is read here.
        s, ys = torch.zeros(8, 1), []
        for x in u[0, :, d]:
            s = torch.from_numpy(into) @ s + torch.from_numpy(by) * x
            ys.append((ours.C[d : d + 1] @ s)[0, 0])
        read.append(torch.stack(ys))
    y = torch.stack(read, -1)[None] + u * ours.skip
    torch.testing.assert_close(ours(u)[0], ours.output_linear(F.gelu(y)))


def compare(layer, ours, theirs, parameters: dict[str, Tensor], rtol):
    """Outputs of two functions of x, and the gradients of x and of the parameters: theirs as functions, ours by name.

    theirs: (x, parameters) -> y, of what is ours under our names, so that what they hold otherwise is made of it.
    """
    x = torch.randn(2, T, DIM, dtype=next(iter(parameters.values())).dtype)
    results = []
    for run, leaves in ((ours, dict(layer.named_parameters())), (lambda x: theirs(x, parameters), parameters)):
        given = x.clone().requires_grad_()
        y = run(given)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)
        grads = torch.autograd.grad(y, [given, *leaves.values()], weights)
        results.append({"y": y, "x": grads[0], **dict(zip(leaves, grads[1:], strict=True))})
    mine, other = results
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        error = (value - other[name]).abs().max() / other[name].abs().max()
        assert error <= rtol, f"{name}: {error}"


def copies(layer) -> dict[str, Tensor]:
    return {name: part.detach().clone().requires_grad_() for name, part in layer.named_parameters()}


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
def test_s5_of_s5_pytorch(monkeypatch, rule, spans, blocks):
    """Without the conjugate half and the activation, which it lacks; in float64, where it says complex64."""
    model = pytest.importorskip("s5.s5_model", reason="needs the extra `outside`")
    monkeypatch.setattr(model, "as_complex", torch.view_as_complex)
    theirs = model.S5(DIM, 8, block_count=blocks).seq
    theirs.discretize = getattr(model, f"discretize_{rule}")
    layer = S5(DIM, 8, blocks, conj_sym=False, activation="none", discretization=rule).double()
    timespans = torch.rand(2, T, dtype=torch.float64) + 0.5

    def run(x, p):
        held = {"Lambda": torch.complex(p["Lambda_re"], p["Lambda_im"]), "C": torch.view_as_complex(p["C"])}
        held |= {"B": p["B"], "D": p["D"], "log_step": p["log_step"][:, 0]}
        scales = timespans if spans else torch.ones(2)
        return torch.stack([torch.func.functional_call(theirs, held, row) for row in zip(x, scales, strict=True)])

    def ours(x):
        return layer(x, timespans=timespans if spans else None)[0]

    compare(layer, ours, run, copies(layer), 1e-9)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("size", [5, DIM])
def test_lru_of_lru_pytorch(size):
    """Its D is a matrix; ours, as in the paper's program, is the diagonal of one."""
    outside = pytest.importorskip("LRU_pytorch", reason="needs the extra `outside`")
    theirs = outside.LRU(DIM, DIM, size)
    layer = LRU(DIM, size)

    def run(x, p):
        held = {name: p[name] for name in ("nu_log", "theta_log", "gamma_log")} | {"D": p["D"].diag()}
        held |= {name: torch.complex(p[f"{name}_re"], p[f"{name}_im"]) for name in "BC"}
        return torch.func.functional_call(theirs, held, (x,))

    compare(layer, lambda x: layer(x)[0], run, copies(layer), 1e-9)


@pytest.mark.parametrize("expand", [1.0, 1.5])
@pytest.mark.parametrize("ours", [MinGRU, MinLSTM])
def test_mingru_and_minlstm_of_mingru_pytorch(ours, expand):
    """The whole sequence, which it scans in logarithms, and one step at a time."""
    name = ours.__name__.replace("Min", "min")
    outside = pytest.importorskip(f"minGRU_pytorch.{name}", reason="needs the extra `outside`")
    theirs = getattr(outside, name)(DIM, expand, proj_out=True).double()
    layer = ours(DIM, expand, bias=False).double()
    layer.load_state_dict(theirs.state_dict(), strict=True)

    def steps(x, _):
        before, ys = None, []
        for t in range(T):
            y, before = theirs(x[:, t : t + 1], before, return_next_prev_hidden=True)
            ys.append(y)
        return torch.cat(ys, 1)

    for run in (lambda x, _: theirs(x), steps):
        compare(layer, lambda x: layer(x)[0], run, dict(theirs.named_parameters()), 1e-9)


class ModalFilters(nn.Module):
    """Filters of Hyena as sums of exponentials, Re Σ residue pole^j: poles, residues (channels or 1, N, 1, 2)."""

    def __init__(self, channels: int):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(DIM))
        poles = torch.polar(0.4 + 0.5 * torch.rand(channels, 3, 1), 3 * torch.rand(channels, 3, 1))
        self.poles = nn.Parameter(torch.view_as_real(poles))
        self.residues = nn.Parameter(torch.randn(channels, 3, 1, 2))

    def filters(self) -> Tensor:
        poles, residues = torch.view_as_complex(self.poles), torch.view_as_complex(self.residues)
        return (residues * poles ** torch.arange(T)).real.sum(1).expand(DIM, T)


@pytest.mark.parametrize("channels", [DIM, 1])
@pytest.mark.parametrize("window", [3, 4])
def test_hyena_of_stripedhyena(channels, window):
    """All but the network that makes the filters, which there are sums of exponentials; theirs is in float32."""
    reason = "needs stripedhyena: pip install --no-deps stripedhyena, for it asks for flash-attn and does without"
    model = pytest.importorskip("stripedhyena.model", reason=reason)
    from stripedhyena.utils import dotdict

    config = {"hidden_size": DIM, "num_filters": DIM, "num_attention_heads": 1, "column_split_hyena": False}
    config |= {"short_filter_length": window, "short_filter_bias": True}
    config |= {"state_size": 3, "hyena_filter_groups": DIM // channels}
    theirs = model.ParallelHyenaFilter(dotdict(config), 0)
    layer = Hyena(DIM, T, conv_size=window)
    layer.filter_fn = ModalFilters(channels)

    def run(x, p):
        held = {"D": p["filter_fn.bias"], **{name: p[f"filter_fn.{name}"] for name in ("poles", "residues")}}
        held |= {f"short_filter_{name}": p[f"short_filter.{name}"] for name in ("weight", "bias")}
        inside = F.linear(x, p["in_proj.weight"], p["in_proj.bias"])
        y, _ = torch.func.functional_call(theirs, held, (inside,))
        return F.linear(y, p["out_proj.weight"], p["out_proj.bias"])

    compare(layer, lambda x: layer(x)[0], run, copies(layer), 1e-5)

"""State space layers against implementations that are not ours, weights copied over by name."""

import pytest
import torch

from scanl.layers import S4, S4D, Attention, Mamba, WindowAttention

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
    ours = Mamba(DIM, 6, 3, dt_rank=3, bias=bias).float()
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
    ours = S4D(3, 8, disc=disc).double()
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

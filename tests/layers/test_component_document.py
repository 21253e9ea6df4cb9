"""The component document's programs as printed there, by its own names; only its import and its device are replaced.

What a program leaves open, such as `sample`, the test supplies. The document's own classes are a second program of the
same mathematics: with equal weights they give the numbers of the library's.
"""

import hashlib
import math
import re
import typing
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers import Bidirectional, LinearRNN, MultiScaleRNN, ShortConvolution
from scanl.models import LanguageModel, Stack
from scanl.ops import linear_attention, linear_scan

DOCUMENT = Path(__file__).with_name("component_document.md").read_text("utf-8")


class NexusModule(nn.Module):
    """The base class of the document's modules, which it does not print."""


SUPPLIED = {"torch": torch, "nn": nn, "F": F, "math": math, "NexusModule": NexusModule}
SUPPLIED |= {name: getattr(typing, name) for name in ("Optional", "Tuple")}


def printed(title):
    """The program under a heading. Its module stands in `scanl.layers`, and its device is the CPU."""
    section = re.split(rf"^#+ {re.escape(title)}$", DOCUMENT, flags=re.MULTILINE)[1]
    (program,) = re.match(r"\n+```python\n(.*?)```", section, re.DOTALL).groups()
    program = program.replace("from nexus.components.ssm import", "from scanl.layers import")
    return program.replace(".cuda()", "").replace("device='cuda'", "device='cpu'")


def run(title, **names):
    """The names that a program leaves, after it has run with `names` beside what it imports above."""
    scope = SUPPLIED | names
    exec(compile(printed(title), title, "exec"), scope)
    return scope


def example(number, **names):
    (title,) = re.findall(rf"^### (Example {number}: .*)$", DOCUMENT, re.MULTILINE)
    return run(title, **names)


THEIRS = run("Architecture Components")["LinearRNN"]  # whose recurrence is none: what it reads


def alike(theirs, ours, x):
    """Two programs with the same weights give the same outputs, and ours the same in pieces."""
    weights = ours.state_dict()
    theirs.load_state_dict({name: weights[name] for name in theirs.state_dict()})
    expected, state = theirs(x)
    whole, last = ours(x)
    torch.testing.assert_close(whole, expected)
    first, carried = ours(x[:, :3])
    steps = [first]
    for t in range(3, x.shape[1]):
        y, carried = ours(x[:, t : t + 1], carried)
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), expected)
    assert carried.shape == last.shape == state.shape
    torch.testing.assert_close(carried.recurrent, state)


def test_the_document_stands_here_word_for_word():
    assert (
        hashlib.sha256(DOCUMENT.encode()).hexdigest()
        == "cd16316665214203aaabf8c39cba88ba2e47dd4d4319429eb5d7cf22667e8014"
    )


def test_calls_by_position_are_those_of_the_document():
    ours, theirs = LinearRNN(12, 3, False, True, 5), THEIRS(12, 3, False, True, 5)
    missing = {"decay"}  # the recurrence that ours has by itself
    assert {name: value.shape for name, value in ours.state_dict().items() if name not in missing} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    for name in ("dim", "expand", "hidden_dim"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert not hasattr(LinearRNN(12, 2, True, False), "conv")
    assert LinearRNN(12, use_short_conv=False).init_state(1).conv is None
    short = ShortConvolution(12, 3, False, True)
    assert (short.dim, short.kernel_size, short.causal, short.conv.bias) == (12, 3, True, None)


@pytest.mark.parametrize(
    "options", [{}, {"use_short_conv": False}, {"expand": 1, "bias": False, "conv_size": 2}], ids=str
)
def test_the_printed_block_with_a_recurrence_of_ones_own(options):
    def leaky(base):
        class Leaky(base):
            def recurrent_forward(self, x, state=None):
                return linear_scan(x, torch.full_like(x, 0.9), state)

        return Leaky(6, **options)

    alike(leaky(THEIRS), leaky(LinearRNN), torch.randn(2, 8, 6))


def test_the_printed_forward_runs_in_a_subclass_of_ours():
    """Whoever overrides `forward` as it is printed calls `self.conv`, which is padded for it."""

    class Printed(LinearRNN):
        forward, recurrent_forward = THEIRS.forward, THEIRS.recurrent_forward

    model, x = Printed(6), torch.randn(2, 8, 6)
    theirs = THEIRS(6)
    theirs.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x)[0], theirs(x)[0])


def test_example_1(capsys):
    example(1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Output shape: torch.Size([2, 100, 512])", "State shape: torch.Size([2, 1024])"]
    assert lines[2:] == [f"Step {t}: torch.Size([1, 1, 512])" for t in range(100)]


def test_example_2():
    names = example(2, LinearRNN=LinearRNN)
    assert names["output"].shape == (2, 100, 512)
    assert names["state"].shape == (2, 1024)
    alike(example(2, LinearRNN=THEIRS)["MyCustomRNN"](dim=6), names["MyCustomRNN"](dim=6), torch.randn(2, 8, 6))


def test_example_2_begins_from_a_tensor():
    model = example(2, LinearRNN=LinearRNN)["MyCustomRNN"](dim=6)
    x, state = torch.randn(2, 8, 6), torch.randn(2, 12)
    theirs = example(2, LinearRNN=THEIRS)["MyCustomRNN"](dim=6)
    theirs.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x, state)[0], theirs(x, state)[0])
    with pytest.raises(ShapeError, match=r"MyCustomRNN: state.recurrent has shape \(1, 12\), expected \(2, ...\)"):
        model(x, state[:1])


def test_example_3(capsys):
    names = example(3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Output shape: torch.Size([2, 100, 512])"
    assert lines[-1] == "Step 9: output torch.Size([2, 1, 512]), cache torch.Size([2, 3, 512])"
    assert names["conv"].causal


@pytest.mark.parametrize(("kernel_size", "causal"), [(4, True), (1, True), (3, False), (4, False)])
def test_the_printed_short_convolution(kernel_size, causal):
    theirs = run("Short Convolution Component")["ShortConvolution"](6, kernel_size, causal=causal)
    ours, x = ShortConvolution(dim=6, kernel_size=kernel_size, causal=causal), torch.randn(2, 8, 6)
    theirs.load_state_dict(ours.state_dict())
    expected, last = theirs(x)
    y, cache = ours(x)
    torch.testing.assert_close(y, expected[:, :8])  # an even centred window gives one step too many as printed
    torch.testing.assert_close(cache, last if kernel_size > 1 else last[:, :0])  # which is [-0:], the whole, as printed
    if causal and kernel_size > 1:  # of one step, y as printed is read where the padding is, and not at the step
        torch.testing.assert_close(ours(x[:, :1], cache)[1], theirs(x[:, :1], last)[1])


def test_a_centred_window_continues_what_was_read():
    layer, x = ShortConvolution(dim=6, kernel_size=5, causal=False), torch.randn(2, 8, 6)
    _, cache = layer(x[:, :4])
    torch.testing.assert_close(layer(x[:, 4:], cache)[0], layer(x)[0][:, 4:])


def test_example_4(capsys):
    example(4, LinearRNN=LinearRNN)
    # The comment has (2, 8, 64, 64); 8 heads of 2 * 512 channels have 128 each.
    assert "State: torch.Size([2, 8, 128, 128])" in capsys.readouterr().out
    matrix = [example(4, LinearRNN=base)["ExponentialDecayRNN"](dim=6, num_heads=2) for base in (THEIRS, LinearRNN)]
    alike(*matrix, torch.randn(2, 8, 6))


def test_common_recurrence_patterns():
    names = run("Common Recurrence Patterns", seq_len=5)
    q, k, v = (torch.randn(2, 5, 3, 4) for _ in range(3))
    state, g = torch.randn(2, 3, 4, 4), -torch.rand(2, 5, 3, 4)
    states, last = names["exponential_decay_recurrence"](k, v, g, state)
    y, ours = linear_attention(q, k, v, g, state=state, scale=1.0)
    torch.testing.assert_close(torch.einsum("bthd,bthde->bthe", q, states), y)
    torch.testing.assert_close(last, ours)
    decay = torch.rand(3)
    y, last = names["gated_recurrence"](q, k, v, decay, state)
    theirs = linear_attention(q, k, v, decay.log().expand(2, 5, 3), state=state, scale=1.0)
    torch.testing.assert_close((y, last), theirs)
    x, A, B, C = torch.randn(2, 5, 3), torch.diag(torch.rand(4)), torch.randn(4, 3), torch.randn(2, 4)
    y, last = names["linear_ssm_recurrence"](x, A, B, C, torch.zeros(2, 4))
    h, ours = linear_scan(x @ B.T, A.diagonal())
    torch.testing.assert_close((y, last), (h @ C.T, ours))


def test_states_of_every_form_that_the_document_has():
    names = run("3. State Initialization", zeros=torch.zeros, batch=2, hidden_dim=12, num_heads=2, head_dim=3)

    class Several(LinearRNN):
        def recurrent_forward(self, x, state):
            state = state or names["state"]
            total = state["denominator"] + x.mean(1).view(2, 2, -1)[..., :3]
            return x, {**state, "denominator": total}

    model, x = Several(6, use_short_conv=False), torch.randn(2, 4, 6)
    state = model(x, model(x)[1])[1].recurrent
    assert state.keys() == {"kv_state", "denominator", "last_token"}
    torch.testing.assert_close(model(x, names["state"])[1].recurrent["denominator"], 0.5 * state["denominator"])


def test_state_management():
    model, x = LinearRNN(6), torch.randn(2, 1, 6)
    names = run(
        "State Management", parallel_compute=lambda x: model(x)[0], recurrent_step=lambda h, x: model.step(x, h)[0],
        x_all=x, x_t=x[:, 0], h_prev=model.init_state(2),
    )  # fmt: skip
    torch.testing.assert_close(names["h_t"], names["h_all"][:, 0])


@pytest.mark.parametrize(
    ("title", "option"), [("2. Convolution Kernel Size", "conv_size"), ("3. Expansion Factor", "expand")]
)
def test_best_practices_are_options(title, option):
    value = run(title)[option]
    assert getattr(LinearRNN(dim=8, **{option: value}), option) == value


def test_best_practices_of_the_body():
    dim, seen = 8, torch.randn(2, 5, 8)
    run("1. State Size Selection", d_model=dim, num_heads=2, head_dim=4)
    body = {"recurrence": lambda x: 0.5 * x, "sigmoid": torch.sigmoid, "silu": F.silu, "project": lambda x: x}
    body |= {
        "x": seen,
        "gate": seen,
        "split": lambda x: x.chunk(2, -1),
        "LayerNorm": lambda y: F.layer_norm(y, y.shape[-1:]),
    }
    assert run("4. Gating Mechanisms", **body)["output"].shape == (2, 5, 4)
    run("5. Normalization Placement", **body)
    layer = LinearRNN(dim)
    with torch.no_grad():
        layer.in_proj.bias.fill_(1)
    names = run("6. Initialization", self=layer, dim=dim)
    assert not layer.in_proj.bias.any()
    layer.decay = names["decay"]


def test_incremental_decoding_generates():
    model = LanguageModel(11, Stack(8, 1, "linear_rnn")).eval()
    prompt = torch.tensor([[3, 1, 4]])
    greedy = lambda logits: logits.argmax(-1)  # noqa: E731
    names = run("7. Incremental Decoding", model=model, sample=greedy, max_tokens=6, input_ids=prompt)
    generated = list(model.generate(prompt, max_new_tokens=6, temperature=0))
    torch.testing.assert_close(torch.stack(names["generated"]), torch.stack(generated).view(6, 1))


def test_pitfall_of_a_state_of_another_batch():
    """The first half of the program is an error, as its comment says; the second begins from a tensor."""
    wrong, right = printed("1. State Shape Mismatch").split("# ✅")
    scope = {"torch": torch, "model": LinearRNN(6, expand=1), "dim": 6, "seq_len": 5}
    with pytest.raises(ShapeError, match=r"'state.recurrent': \(1, 6\).* expected .*'state.recurrent': \(8, 6\)"):
        exec(wrong, scope)
    exec("# " + right, scope)
    assert scope["state"].shape == (8, 6)
    torch.testing.assert_close(scope["output"], scope["model"](scope["x"])[0])


def test_other_pitfalls():
    x = torch.randn(2, 8, 5)
    names = run("2. Forgetting Causal Padding", dim=8, x=x, seq_len=5)
    torch.testing.assert_close(names["conv"](x[..., :3])[..., :3], names["y"][..., :3])
    assert run("3. Not Using Depthwise Convolution")["conv"].weight.shape == ShortConvolution(512).conv.weight.shape
    assert callable(run("4. Improper State Updates")["forward"])
    layer, x = LinearRNN(6), torch.randn(2, 5, 6)
    for training, recurrence in ((True, lambda state, x_t: layer.step(x_t, state)[1]), (False, layer)):
        layer.train(training)
        names = {"self": layer, "x": x, "state": layer.init_state(2), "recurrence": recurrence}
        names = run("5. Parallel vs Sequential Confusion", **names, seq_len=5, parallel_scan=layer)
        torch.testing.assert_close(names["output"][0], layer(x)[0])


def test_parallel_scan():
    """As printed it adds up; with a decay it multiplies once where it should by a power of it."""
    scan = run("1. Parallel Scan Algorithm")["parallel_scan"]
    for steps in (1, 2, 7, 16, 33):
        x = torch.randn(2, steps, 3, dtype=torch.float64)
        expected, _ = linear_scan(x, torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(scan(inputs=x.clone(), decay=1.0), expected)
    decayed = linear_scan(x, torch.full((3,), 0.5, dtype=torch.float64))[0]
    assert not torch.allclose(scan(x.clone(), 0.5), decayed)


def test_chunk_wise_recurrence_begins_from_a_tensor():
    model, x = LinearRNN(dim=6, expand=2), torch.randn(2, 150, 6)
    chunked = run("2. Chunk-wise Processing", process_chunk=model)["chunk_wise_recurrence"]
    for state in (None, torch.zeros(2, 12), torch.randn(2, 12), model.init_state(2)):
        for size in ({}, {"chunk_size": 7}):
            y, last = chunked(x, state, **size)
            torch.testing.assert_close((y, last), model(x, state))


def test_bidirectional():
    """The printed class over ours; and ours, which is made of a forward and a backward layer."""
    theirs = run("3. Bi-directional Processing", LinearRNN=LinearRNN)["BidirectionalLinearRNN"](dim=6, expand=2)
    ours, x = Bidirectional(6, "linear_rnn", layer_options={"expand": 2}), torch.randn(2, 8, 6)
    weights = {f"forward_layer.{name}": value for name, value in theirs.state_dict().items() if "backward" not in name}
    weights |= {f"backward_layer.{name}": value for name, value in theirs.backward_rnn.state_dict().items()}
    ours.load_state_dict(weights)
    y, (ahead, behind) = theirs(x)
    torch.testing.assert_close(ours(x)[0], y)
    assert ahead.shape == behind.shape == (2, 12)
    y, _ = theirs(x, state_fwd=ahead, state_bwd=behind)
    back, _ = theirs.backward_rnn(x.flip(1), behind)
    torch.testing.assert_close(y, LinearRNN.forward(theirs, x, ahead)[0] + back.flip(1))


def test_multi_scale():
    """The printed class, whose recurrence of one scale is left open, over ours; and ours by the same names."""
    base = run("4. Multi-Scale Recurrence", LinearRNN=LinearRNN)["MultiScaleRNN"]

    class Supplied(base):
        def scale_recurrence(self, x, state, decay):
            return linear_scan(x, decay.expand(x.shape[2]), state)

    theirs, ours = Supplied(dim=6, expand=2, num_scales=3), MultiScaleRNN(dim=6, expand=2, num_scales=3)
    weights = theirs.state_dict()
    ours.load_state_dict(
        {**{name: weights[name] for name in weights if name != "decays"}, "decay": weights["decays"].logit()}
    )
    x = torch.randn(2, 8, 6)
    whole, states = theirs(x)
    torch.testing.assert_close(ours(x)[0], whole)
    torch.testing.assert_close(ours(x)[1].recurrent, torch.stack(states.recurrent, 1))
    first, state = theirs(x[:, :3])
    torch.testing.assert_close(torch.cat([first, theirs(x[:, 3:], state)[0]], 1), whole)
    torch.testing.assert_close(theirs(x, list(states.recurrent))[0], ours(x, torch.stack(states.recurrent, 1))[0])

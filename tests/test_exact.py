"""The law of equal bits: in an `exact` context a sequence has the same bits, however it was cut, batched and packed."""

import functools
import math
import random
import sys
import threading
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import laws
import scanl
from scanl import layers, ops
from scanl.layers import padded
from scanl.layers import state as states
from scanl.models import LanguageModel, Stack
from tests.test_layer_robustness import limit
from tests.test_layers import DIM, STREAMING, inputs, make

COVERS = ["ops/exact", "ops/products/blocks", "ops/products/few_rows", "ops/products/functions"]

pytestmark = [pytest.mark.early(3)] + [pytest.mark.cells_by_loop("name")] * (not laws.ALL)

DRAWS, LONGEST = 200 if laws.ALL else 1, 24  # draws of a layer, and steps of a sequence
DTYPES = [torch.float32, torch.bfloat16] if laws.ALL else [torch.float32]


def assert_equal_bits(actual, expected):
    for (place, a), (_, b) in zip(states.leaves(actual), states.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, at=place: f"{at}: {text}")


def in_company(layer, x, draw):
    """Return what a layer gives for x (1, T, D) in another way, at random: cut, in a batch, packed or padded."""
    steps, others = x.shape[1], draw.randrange(1, 4)
    way = draw.choice(["pieces", "tokens", "batch", "packed", "padded"])
    way = "pieces" if steps > LONGEST and way == "tokens" else way  # a call a step: short sequences stand for long ones
    torch.set_num_threads(draw.choice([1, 2]))
    if way in ("batch", "padded"):
        at = draw.randrange(others + 1)
        batch = torch.randn(others + 1, steps + 3, *x.shape[2:]).to(x.dtype)
        if way == "batch":
            batch = batch[:, :steps]
            batch[at] = x[0]
            y, state = layer(batch)
            return y[at : at + 1], states.index(state, slice(at, at + 1))
        mask = torch.ones(batch.shape[:2], dtype=torch.bool)
        first = draw.randrange(4)
        mask[at] = False
        mask[at, first : first + steps] = True
        batch[at, first : first + steps] = x[0]
        y, state = padded(layer, batch, mask)
        return y[at : at + 1, first : first + steps], states.index(state, slice(at, at + 1))
    if way == "packed":
        before, after = draw.randrange(1, 9), draw.randrange(1, 9)
        row = torch.randn(1, before + steps + after, *x.shape[2:]).to(x.dtype)
        row[:, before : before + steps] = x
        y, state = layer(row, cu_seqlens=torch.tensor([0, before, before + steps, row.shape[1]]))
        return y[:, before : before + steps], states.index(state, slice(1, 2))
    state, ys, at = None, [], 0
    while at < steps:
        size = 1 if way == "tokens" else draw.randrange(1, steps + 1)
        y, state = layer(x[:, at : at + size], state)
        ys.append(y)
        at += size
    return torch.cat(ys, 1), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STREAMING)
def test_bits_are_the_same_in_any_company(name, dtype):
    layer, draw = make(name, dtype), random.Random(name)
    most = (limit(make(name)) or math.inf) - 3  # steps of a sequence; those beside it in a batch have three more
    torch.manual_seed(1)
    with torch.no_grad(), scanl.exact():
        for number in range(DRAWS):
            if number % 5 == 0:  # a sequence is drawn, and read at once, for five companies
                longest = 4 * LONGEST if number % 50 == 45 else LONGEST
                x = torch.randn(1, min(draw.randrange(2, longest), most), DIM).to(dtype)
                torch.set_num_threads(1)
                whole = layer(x)
            assert_equal_bits(in_company(layer, x, draw), whole)


SPANS = {"window", "chunk_size", "num_slots", "max_length"}  # options: over how many steps or slots a layer sums
SPANNING = [
    name
    for name in STREAMING
    if name in layers.names()
    and layers.get(name).sample.keys() & SPANS
    and "bits_are_the_same_in_any_company" not in layers.get(name).excused
]


@pytest.mark.parametrize("name", SPANNING)
def test_bits_are_the_same_over_more_keys_than_a_vector_of_the_processor_has(name):
    """Up to 8 keys a library sums in one way, 16 and more in another, and what remains after them in a third."""
    options = dict(layers.get(name).sample)
    options |= {option: 24 if option != "max_length" else 2 * LONGEST for option in SPANS if option in options}
    torch.manual_seed(1)
    layer, x, draw = layers.build(name, DIM, **options), torch.randn(1, 2 * LONGEST - 3, DIM), random.Random(name)
    torch.set_num_threads(1)
    with torch.no_grad(), scanl.exact():
        whole, state, ys = layer(x), None, []
        for piece in x.split([5, 1, 1, 9, x.shape[1] - 16], 1):
            y, state = layer(piece, state)
            ys.append(y)
        assert_equal_bits((torch.cat(ys, 1), state), whole)
        assert_equal_bits(in_company(layer, x, draw), whole)


def test_the_law_can_fail():
    """Without the context, a product of one row has other bits than that of many."""
    layer, x = make("linear_attention", torch.float32), torch.randn(4, 39, DIM)
    with torch.no_grad():
        assert any(not torch.equal(layer(row[None, :1])[0], layer(row[None])[0][:, :1]) for row in x)


@pytest.mark.parametrize("mixer", ["hawk", "gated_deltanet", "mamba"])
def test_a_language_model_has_the_same_logits_token_by_token(mixer):
    torch.manual_seed(0)
    model = LanguageModel(50, Stack(48, 2, mixer)).eval()
    tokens = torch.randint(50, (2, 33))
    with torch.no_grad(), scanl.exact():
        whole, last = model(tokens)
        state, logits = None, []
        for t in range(tokens.shape[1]):
            y, state = model(tokens[:, t : t + 1], state)
            logits.append(y)
        assert_equal_bits((torch.cat(logits, 1), state), (whole, last))
        assert_equal_bits((model(tokens[1:])[0], ()), (whole[1:], ()))


@pytest.mark.parametrize("op", [op for op in ops.registry.declared() if not op.excused], ids=lambda op: op.name)
def test_ops_have_the_same_bits_in_pieces(op):
    for sample in list(op.samples)[:3]:
        if "cu_seqlens" in sample.options:
            continue
        operands = {name: None if v is None else v.to(_narrow(v.dtype)) for name, v in sample.operands.items()}
        steps = operands[op.names[0]].shape[1]
        state = operands.pop(op.state, None)
        with torch.no_grad(), scanl.exact():
            whole, last = op(**operands, **{op.state: state}, **sample.options)
            ys = []
            for t in range(steps):
                one = laws.timed(op, operands, t, t + 1)
                y, state = op(**one, **{op.state: state}, **sample.options)
                ys.append(y)
        assert_equal_bits((torch.cat(ys, 1), state), (whole, last))


def _narrow(dtype):
    return {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(dtype, dtype)


@pytest.mark.parametrize(("terms", "columns"), [(1, 1), (3, 2), (12, 10), (48, 5), (200, 130), (256, 64), (448, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_rows_of_a_product_have_the_same_bits_among_others(terms, columns, dtype):
    torch.manual_seed(0)
    x, w, bias = (torch.randn(shape).to(dtype) for shape in ((150, terms), (columns, terms), (columns,)))
    with scanl.exact():
        stored = w.t().contiguous()
        products = [
            lambda x: F.linear(x, w, bias),
            lambda x: x @ w.t(),
            lambda x: x @ stored,
            lambda x: torch.einsum("tk,nk->tn", x, w),
            lambda x: torch.bmm(x.expand(2, -1, -1), torch.stack([stored, 2 * stored]))[0],
        ]
        for product in products:
            y = product(x)
            for first, rows in ((0, 1), (5, 1), (5, 2), (70, 3), (3, 4), (9, 60), (1, 149)):
                assert torch.equal(product(x[first : first + rows]), y[first : first + rows])
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(y, x @ w.t(), rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhk,bhkv->bhv", [(2, 3, 5), (2, 3, 5, 4)]),
        ("goi,bi->bgo", [(3, 4, 5), (2, 5)]),
        ("btdn,dn->btd", [(2, 3, 4, 5), (4, 5)]),
        ("...hk,hmk->...hm", [(2, 7, 3, 5), (3, 6, 5)]),
        ("bi,bj->bij", [(2, 3), (2, 4)]),
        ("bkk,bk->b", [(2, 3, 3), (2, 3)]),  # no product of matrices: torch's own
    ],
)
def test_einsum_and_its_gradients(equation, shapes):
    torch.manual_seed(0)
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    expected = torch.einsum(equation, a, b)
    with scanl.exact():
        y = torch.einsum(equation, a, b)
    torch.testing.assert_close(y, expected)
    for one, other in zip(
        torch.autograd.grad(y.sin().sum(), [a, b]), torch.autograd.grad(expected.sin().sum(), [a, b]), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_equations_with_dots_in_one_operand_are_exact():
    q, w = torch.randn(3, 37, 2, 9), torch.randn(2, 17, 9)
    with scanl.exact():
        y = torch.einsum("...hk,hmk->...hm", q, w)
        assert torch.equal(torch.einsum("...hk,hmk->...hm", q[:, :1], w), y[:, :1])


def test_groups_of_rows_are_exact():
    torch.manual_seed(0)
    x, w = torch.randn(40, 24), torch.randn(3, 24, 20)
    with scanl.exact():
        y = F.grouped_mm(x, w, offs=torch.tensor([7, 7, 40], dtype=torch.int32))
        assert torch.equal(y[:7], x[:7] @ w[0])
        assert torch.equal(y[7:9], x[7:9] @ w[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_does_not_depend_on_hidden_keys(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 37, 20).to(dtype) for heads in (4, 2, 2))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    with scanl.exact():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for steps in (1, 5, 37):
            visible = F.pad(torch.ones(steps, 37, dtype=torch.bool).tril(37 - steps), (3, 2))
            keys, values = (F.pad(tensor, (0, 0, 3, 2), value=9.0) for tensor in (k, v))
            last = F.scaled_dot_product_attention(
                q[:, :, -steps:], keys, values, attn_mask=visible[None, None], enable_gqa=True
            )
            assert torch.equal(last, y[:, :, -steps:])
    assert (y - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("terms", [7, 37, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softmax_does_not_depend_on_hidden_terms_or_on_its_place(dtype, terms):
    torch.manual_seed(0)
    x = torch.randn(3, terms, 24).to(dtype)
    with scanl.exact():
        y = x.softmax(1)
        assert torch.equal(F.softmax(x[1:2], 1), y[1:2])
        assert torch.equal(torch.softmax(x.mT.contiguous(), -1).mT, y)
        assert torch.equal(F.pad(x, (0, 0, 5, 3), value=-torch.inf).softmax(1)[:, 5:-3], y)
        assert torch.full((2, 3), -torch.inf).softmax(1).isnan().all()
    assert (y - x.double().softmax(1)).abs().max() <= torch.finfo(dtype).eps


def test_gradients_of_attention_are_those_of_torch():
    torch.manual_seed(0)
    operands = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(*operands, is_causal=True).sin().sum(), operands)
    with scanl.exact():
        actual = torch.autograd.grad(F.scaled_dot_product_attention(*operands, is_causal=True).sin().sum(), operands)
    torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("name", ["hawk", "gla", "rwkv7"])
def test_gradients_are_right(name):
    layer, x = make(name), inputs(2, 7)
    expected = torch.autograd.grad(layer(x)[0].sin().sum(), list(layer.parameters()))
    with scanl.exact():
        actual = torch.autograd.grad(layer(x)[0].sin().sum(), list(layer.parameters()))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_torch_has_its_own_functions_outside_and_in_other_threads():
    before, found = F.linear, []
    layer, x = make("gru", torch.float32), torch.randn(1, 3, DIM)
    with scanl.exact(), scanl.exact():
        assert F.linear is not before
        thread = threading.Thread(target=lambda: found.append(ops._frame.context.exactly()))
        thread.start()
        thread.join()
        layer(x)
    assert F.linear is before
    assert found == [False]
    with pytest.raises(ZeroDivisionError), scanl.exact():
        raise ZeroDivisionError
    assert F.linear is before


def test_what_another_program_replaced_meanwhile_stays(monkeypatch):
    before, others = torch.mm, []
    monkeypatch.setattr(F, "linear", F.linear)  # as it was, when the test is over
    with scanl.exact():
        ours = F.linear
        F.linear = lambda *args: others.append(1) or ours(*args)
        replaced = F.linear
    assert F.linear is replaced
    assert torch.mm is before
    x, w = torch.randn(5, 8), torch.randn(4, 8)
    assert torch.equal(F.linear(x, w), x @ w.t())
    assert others == [1]


def test_autocast_counts():
    with scanl.exact(), torch.autocast("cpu", torch.bfloat16):
        assert F.linear(torch.randn(5, 8), torch.randn(4, 8)).dtype == torch.bfloat16


def test_a_machine_without_equal_bits_is_refused(monkeypatch):
    from scanl.ops.products import blocks

    monkeypatch.setattr(blocks, "_bmm", lambda a, b: torch.bmm(a, b) + torch.rand(()))
    monkeypatch.setattr(blocks, "has_kernels", lambda: False)  # which would multiply all rows
    blocks.product_order.cache_clear()
    with pytest.raises(scanl.ScanlError, match=r"exact: a row by a matrix \(5, 3\) of torch.float32 depends on its"):
        blocks.product_order(torch.float32, 5, 3, True, 1)
    blocks.product_order.cache_clear()


def test_layers_without_the_law_say_so():
    excused = {name for name in layers.names() if "bits_are_the_same_in_any_company" in layers.get(name).excused}
    assert "s4" in excused  # a filter through an FFT
    assert not excused & {"mamba", "mamba2", "hawk", "gla", "gated_deltanet", "rwkv7", "gru", "xlstm"}


def test_what_is_compiled_after_a_context_finds_torch_s_own_functions(monkeypatch):
    """Torch makes a table of the functions that it can trace, once: it may be inside of a context."""
    table = functools.cache(lambda: {torch.bmm, torch.baddbmm})
    monkeypatch.setitem(sys.modules, "torch._dynamo.trace_rules", mock.Mock(get_torch_obj_rule_map=table))
    with ops.exact():
        assert torch.baddbmm in table()
    assert torch.baddbmm in table()
    with ops.exact():
        pass
    assert table.cache_info().currsize == 1

"""A compiled step equals the ordinary step. Most kernels run as plain Python here: numba takes seconds for each."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import scanl
from scanl import ops
from scanl.errors import BackendError, ConfigError, ShapeError
from scanl.layers.state import index, leaves
from scanl.models import LanguageModel, Stack, Streams, quantize
from scanl.models.decoding import compiled_step
from scanl.models.decoding.carried_step import CarriedStep
from scanl.models.decoding.compiled_step import CompiledStep
from scanl.ops._compiler import machine_code
from scanl.ops._compiler.recorded import RecordedFunction

LAYERS = ("hawk", "mamba", "mamba2", "gla", "gated_deltanet", "rwkv7", "gru", "xlstm", "lru", "s5", "minlstm", "retnet")
SOME = ("hawk", "mamba2", "rwkv7")  # in every run; the rest with --all
VOCABULARY, DIM = 11, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "mamba2": {"head_dim": 4},
    "retnet": {"num_heads": 2},
    "rwkv7": {"head_dim": 4},
}


@pytest.fixture(autouse=True)
def decoding() -> Iterator[None]:
    """Without gradients; the ordinary step compiles nothing either."""
    with torch.no_grad(), ops.backend("reference"):
        yield


def model_of(layer: str, dim: int = DIM, depth: int = 1, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(VOCABULARY, Stack(dim, depth, layer, layer_options=OPTIONS.get(layer), **options)).eval()


def check_equal(model: LanguageModel, step: CompiledStep, batch: int, tokens: int = 3) -> None:
    """From the second step on every other row begins anew, the last one first."""
    state = after = None
    for n, token in enumerate(torch.randint(VOCABULARY, (tokens, batch))):
        starts = (torch.arange(batch, 0, -1) + n) % 2 == 0
        expected, state = model.step(token, state, starts=starts)
        logits, after = step(token, after, starts=starts)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for (path, leaf), (_, other) in zip(leaves(after), leaves(state), strict=True):
            torch.testing.assert_close(leaf, other, rtol=1e-4, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.parametrize(
    "layer", [layer if layer in SOME else pytest.param(layer, marks=pytest.mark.long) for layer in LAYERS]
)
def test_a_compiled_step_equals_the_step(layer: str) -> None:
    model = model_of(layer)
    step = model.compile_step()
    assert step.reason is None
    check_equal(model, step, 1)


def test_batches_run_in_parts_of_equal_sizes() -> None:
    model = model_of("gru", channel_mixer="none")
    step = model.compile_step(2)
    for batch in (2, 21):  # 21 rows are two parts of 11, which have a row in common
        check_equal(model, step, batch, tokens=2)


@pytest.mark.parametrize("features", ["", "-avx512f,-avx2,-fma"])
def test_portable_bits_depend_on_no_rows_and_no_processor(monkeypatch: pytest.MonkeyPatch, features: str) -> None:
    model, tokens = model_of("hawk"), torch.randint(VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(0))

    def logits(rows: int) -> Tensor:
        step, state, made = CompiledStep(model, model._readable, model._unchecked_step, model._first_tokens), None, []
        for token in tokens:
            one, state = step(token[:rows], state)
            made.append(one)
        return torch.stack(made)

    with scanl.exact(portable=True):
        expected = logits(5)
        if features:  # another processor: its code differs, its bits do not
            version, name, known = machine_code._machine()
            monkeypatch.setattr(machine_code, "_machine", lambda: (version, name, f"{known},{features}"))
        for rows in (1, 4, 5):
            assert torch.equal(logits(rows), expected[:, :rows])


def test_portable_bits_are_refused_where_a_library_computes() -> None:
    model = model_of("s5")  # its turns are by sine and cosine
    with scanl.exact(portable=True), pytest.raises(BackendError, match="cannot have the bits of every machine: "):
        model.compile_step()(torch.tensor([1]), None)


def test_parameters_are_read_anew() -> None:
    model = model_of("gru", channel_mixer="none")
    step = model.compile_step()
    for weight in model.parameters():
        weight.mul_(1.5)
    check_equal(model, step, 1, tokens=1)
    assert model.head is not None
    model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))
    check_equal(model, step, 1, tokens=1)
    model.double()
    token = torch.tensor([3])
    torch.testing.assert_close(step(token, None)[0], model.step(token, None)[0])


class Adapter(nn.Module):
    """A low-rank adapter as libraries write it: it calls the layer that it stands for, and may be switched off."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.enabled, self.scaling = base, True, {"default": 1.0}
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.5))
        self.up = nn.Parameter(torch.full((base.out_features, 2), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.enabled * self.scaling["default"] * (x @ self.down.T @ self.up.T)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def adapted(model: LanguageModel) -> None:
    model.head = Adapter(model.head)  # pyright: ignore


def switched_off(model: LanguageModel) -> None:
    model.head.enabled = False  # pyright: ignore


def scaled(model: LanguageModel) -> None:
    model.head.scaling["default"] = 3.0  # pyright: ignore


def capped(model: LanguageModel) -> None:
    model.logit_cap = 0.01


def parametrized(model: LanguageModel) -> None:
    parametrize.register_parametrization(model.head, "weight", Doubled())  # pyright: ignore


def replaced_by_method(model: LanguageModel) -> None:
    model.head.forward = lambda x: -x @ model.head.weight.T  # pyright: ignore


def enlarged(model: LanguageModel) -> None:
    model.head.weight.data = torch.ones(VOCABULARY + 3, DIM)  # pyright: ignore


def turned(model: LanguageModel) -> None:
    """The same memory, in another order."""
    weight: Any = model.stack.blocks[0].mixer.weight_ih_l0  # pyright: ignore
    weight.data = weight.data.view(DIM, 3 * DIM).T


def renormed(model: LanguageModel) -> None:
    model.stack.norm = nn.LayerNorm(DIM, eps=1.0)  # pyright: ignore


def another_parameter(model: LanguageModel) -> None:
    model.head.weight = nn.Parameter(torch.ones(VOCABULARY, DIM))  # pyright: ignore


CHANGES = {
    change.__name__: change
    for change in (
        adapted, capped, parametrized, replaced_by_method, enlarged, turned, renormed, another_parameter,
    )
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_model_changes_its_compiled_step(change: str) -> None:
    model = model_of("gru", channel_mixer="none")
    step, token = model.compile_step(), torch.tensor([3])
    changes = [CHANGES[change], *((scaled, switched_off) if change == "adapted" else ())]
    for apply in changes:
        before = step(token, None)[0]
        apply(model)
        expected = model.step(token, None)[0]
        assert expected.shape != before.shape or not torch.allclose(expected, before)
        torch.testing.assert_close(step(token, None)[0], expected, rtol=1e-4, atol=1e-5)
        assert step.reason is None


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "global"])
def test_a_hook_runs_at_each_step(kind: str) -> None:
    model = model_of("gru", channel_mixer="none")
    step, token, calls = model.compile_step(), torch.tensor([3]), list[Any]()
    register = {
        "forward": model.stack.register_forward_hook,
        "forward_pre": model.stack.register_forward_pre_hook,
        "global": nn.modules.module.register_module_forward_hook,
    }[kind]
    handle = register(lambda *call: calls.append(call))
    try:
        step(token, None)
        count = len(calls)
        step(token, None)
        assert len(calls) == 2 * count > 0
        assert "hooks" in model.explain()
        count = len(calls)
    finally:
        handle.remove()
    step(token, None)
    assert (len(calls), step.reason) == (count, None)


def test_autocast_is_that_of_the_step() -> None:
    model, token = model_of("gru", channel_mixer="none"), torch.tensor([3])
    step = model.compile_step()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step(token, None)[0], model.step(token, None)[0])
        assert step.kernel(1) is None
    assert step.kernel(1) is not None


def test_a_state_stays_as_it_is() -> None:
    model = model_of("gru", channel_mixer="none")
    step = model.compile_step()
    state = step(torch.tensor([1]), None)[1]
    before = copy.deepcopy(state)
    step(torch.tensor([2]), state)
    for (_, leaf), (_, other) in zip(leaves(state), leaves(before), strict=True):
        assert torch.equal(leaf, other)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of which tokens were read by compiled steps."""
    rows = list[int]()

    def count(step: type) -> None:
        call = step.__call__
        monkeypatch.setattr(step, "__call__", lambda self, *args: (rows.append(len(args[0])), call(self, *args))[1])

    count(CompiledStep)
    count(CarriedStep)
    return rows


def test_generate_uses_the_compiled_step(calls: list[int]) -> None:
    model, prompt = model_of("gru", channel_mixer="none"), torch.tensor([[1, 2, 3]])
    expected = list(model.generate(prompt, max_new_tokens=4, temperature=0))
    model.compile_step()
    assert list(model.generate(prompt, max_new_tokens=4, temperature=0)) == expected
    assert len(calls) == 3  # the prompt is read at once
    calls.clear()
    streams = Streams(model)
    handle = streams.join(prompt[0], temperature=0)
    streams.join(prompt[0, :2], temperature=0)
    steps = [streams.step() for _ in range(4)]
    assert [step[handle] for step in steps] == [int(token) for token in expected]
    assert calls == [2] * 3


def test_a_step_is_compiled_where_that_pays(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """After as many tokens, of all calls; or at once, if as many are asked for. Not where no kernel can run it."""
    monkeypatch.setattr(compiled_step, "MIN_TOKENS", 5)
    prompt = torch.tensor([[1, 2, 3]])
    model = model_of("gru", channel_mixer="none")
    for count, compiled in ((4, 0), (4, 1), (4, 4)):  # the first token is that of the prompt
        list(model.generate(prompt, max_new_tokens=count))
        assert len(calls) == compiled
    calls.clear()
    streams = Streams(model)
    for _ in range(2):
        streams.join(prompt[0])
    for _ in range(8):
        streams.step()
    assert calls == [2] * 2  # two rows have a kernel of their own
    calls.clear()
    list(model_of("gru", channel_mixer="none").generate(prompt, max_new_tokens=6))
    assert len(calls) == 5
    calls.clear()
    dropping = model_of("gru", channel_mixer="none", dropout=0.5).train()
    list(dropping.generate(prompt, max_new_tokens=12))
    assert len(calls) == 3


def test_a_kernel_that_takes_longer_than_the_step_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    call = RecordedFunction.__call__
    monkeypatch.setattr(RecordedFunction, "__call__", lambda kernel, *args: (sum(range(10**6)), call(kernel, *args))[1])
    monkeypatch.setattr(compiled_step, "MAX_TIME", 0)
    model = model_of("gru", channel_mixer="none")
    assert model.explain().startswith("compiled: a kernel takes longer")
    monkeypatch.setattr(compiled_step, "MAX_TIME", 1 << 40)
    assert model_of("gru", channel_mixer="none").explain().startswith("compiled: can run")


def test_few_kernels_serve_batches_of_any_size() -> None:
    model, sizes = model_of("gru", channel_mixer="none"), (1, 3, 5, 7, 16, 19)
    step = model.compile_step()
    with torch.no_grad():
        _, state = model(torch.randint(VOCABULARY, (max(sizes), 3)))
        for size in sizes:
            tokens, before = torch.randint(VOCABULARY, (size,)), index(state, range(size))
            torch.testing.assert_close(step(tokens, before), model.step(tokens, before))
    assert {rows for rows, _ in step._kernels} <= {1, 2, 4, 8, 16}


def test_a_copy_has_a_step_of_its_own() -> None:
    model = model_of("gru", channel_mixer="none")
    model.compile_step()
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.mul_(1.5)
    check_equal(other, other.compile_step(), 1, tokens=1)


def test_the_ordinary_step_runs_where_the_compiled_one_cannot() -> None:
    model, token = model_of("gru", channel_mixer="none"), torch.tensor([3])
    step = model.compile_step()
    with scanl.exact():
        assert torch.equal(step(token, None)[0], model.step(token, None)[0])
    with torch.enable_grad():
        assert step(token, None)[0].requires_grad
    assert model.explain() == "compiled: can run\nordinary: can run"
    assert model.bfloat16().explain().startswith("compiled: weight is torch.bfloat16 (takes float32 and float64)\n")
    assert step(token, None)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("wanted", ["weight", "state"])
def test_the_ordinary_step_runs_where_one_tensor_alone_has_a_gradient(wanted: str) -> None:
    model, token = model_of("gru", channel_mixer="none").requires_grad_(False), torch.tensor([3])
    step, state = model.compile_step(), model.init_state(1)
    leaf = [leaf for _, leaf in leaves(state)][-1] if wanted == "state" else next(model.stack.parameters())
    leaf.requires_grad_()
    with torch.enable_grad():
        slopes = [torch.autograd.grad(one(token, state)[0].square().sum(), leaf)[0] for one in (step, model.step)]
    torch.testing.assert_close(*slopes)
    assert slopes[0].any()


def test_whole_numbers_are_read_where_they_lie() -> None:
    """Also those of a model that is quantized after its step was compiled."""
    torch.manual_seed(0)
    model = LanguageModel(70, Stack(64, 1, "gru", channel_mixer="none"), tie_embeddings=True).eval()
    step, token = model.compile_step(), torch.tensor([3])
    before = step(token, None)[0]
    quantize(model)
    assert step.reason is None
    assert not torch.equal(step(token, None)[0], before)
    check_equal(model, step, 1)
    assert step.reason is None


def test_a_reason_says_which_operation_has_no_loop() -> None:
    model = model_of("gru", channel_mixer="none", dropout=0.5).train()
    assert model.explain() != "compiled: can run\nordinary: can run"
    assert model.eval().explain() == "compiled: can run\nordinary: can run"


def test_another_mode_is_noticed() -> None:
    """In training mode dropout draws numbers, which no kernel does."""
    model, token = model_of("gru", channel_mixer="none", dropout=0.5), torch.tensor([3])
    step, ys = model.compile_step(), list[Tensor]()
    for training in (False, True, False):
        model.train(training)
        torch.manual_seed(1)
        expected = model.step(token, None)[0]
        torch.manual_seed(1)
        ys.append(step(token, None)[0])
        torch.testing.assert_close(ys[-1], expected)
        assert (step.reason is None) is not training
    assert not torch.allclose(ys[0], ys[1])


def test_bad_input_is_refused() -> None:
    model = model_of("gru", channel_mixer="none")
    with pytest.raises(ConfigError, match="compile_step: batch_size is 0, expected at least 1"):
        model.compile_step(0)
    step = model.compile_step()
    with pytest.raises(ShapeError, match=r"tokens is torch.int64 \(1, 1\), expected integers \(B,\)"):
        step(torch.tensor([[3]]), None)
    with pytest.raises(ShapeError, match="gru: state has "):
        step(torch.tensor([3]), model.init_state(2))
    with pytest.raises(ShapeError, match=r"compiled step: starts is of shape \(1, 1\), expected torch.bool \(1,\)"):
        step(torch.tensor([3]), None, starts=torch.tensor([[True]]))
    with pytest.raises(ShapeError, match="token 11 is out of range, expected 0 to 10 of 11"):
        step(torch.tensor([11]), None)


@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS)
def test_a_kernel_of_numba_equals_the_step(layer: str) -> None:
    model = model_of(layer, dim=40, depth=2)
    for batch in (1, 6):
        check_equal(model, model.compile_step(batch), batch)


class TwiceInTraining(torch.nn.Module):
    """Sums its inputs, in training twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.rows = nn.Embedding.from_pretrained(torch.eye(3))

    def init_state(self, batch_size):
        return torch.zeros(batch_size, 3)

    def step(self, tokens, state):
        after = self.rows(tokens) * self.weight * (2 if self.training else 1) + state
        return after, after


def test_a_kernel_is_that_of_the_mode():
    model = TwiceInTraining().eval()
    step = CompiledStep(model, lambda tokens: tokens, model.step, lambda rows: torch.zeros(rows, dtype=torch.int64))
    for training in (False, True, False):
        model.train(training)
        y, _ = step(torch.tensor([1]), torch.ones(1, 3))
        assert y.tolist() == [[1.0, 3.0 if training else 2.0, 1.0]]
    assert step.reason is None

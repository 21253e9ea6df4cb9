"""Random cells: steps that are drawn from all that docs/cells.md allows, on kernels and by the loop.

A step is drawn line by line. Each line is run on small tensors while it is drawn, so that the shape of its value is
known, and a line whose value is large or not finite is drawn again.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import kernels_in_python
import laws
from scanl.errors import ConfigError
from scanl.ops.registry import Cell

SHORT = 60  # draws of every run; with --all there are a thousand
SOME = [pytest.param(first, marks=[pytest.mark.long] * (first > 0)) for first in range(0, SHORT, 20)]  # the slow ones
NUMBERS = 200  # most numbers of a row's value
SIZES = {"B": 3, "T": 4, "D": 6, "H": 2, "K": 5}
TIMED = {"x": "D", "z": "H K"}
PARAMETERS = {"w": "D D", "v": "2 D D", "r": "H K K", "p": "K D", "a": "D", "c": "H K"}
ELEMENT = (  # functions of one element
    "torch.tanh({0})", "torch.sigmoid({0})", "torch.relu({0})", "torch.sin({0})", "torch.cos({0})", "-{0}", "{0} ** 2",
    "{0} ** 3", "F.softplus({0})", "torch.exp(-({0} ** 2))", "F.logsigmoid({0})", "torch.abs({0})", "F.silu({0})",
    "F.gelu({0})", "F.elu({0})", "F.hardtanh({0})", "{0}.clamp(-0.5, 0.7)", "{0}.clamp(min=-0.2)", "{0}.clamp(max=0.3)",
    "F.leaky_relu({0}, 0.1)", "torch.erf({0})", "torch.log1p({0} ** 2)", "torch.sqrt(1 + {0} ** 2)",
    "1 / (2 + {0} ** 2)",
    "(1 + {0} ** 2) ** -0.5", "torch.expm1({0} / 3)", "torch.log(1 + {0} ** 2)", "torch.rsqrt(1 + {0} ** 2)",
    "torch.where({0} > 0.1, {0}, 0.)", "torch.where({0} < 0.2, 1 - {0}, {0} * 2)", "{0}.masked_fill({0} > 0.4, 0.5)",
    "({0} * 2).add_({0}).mul_(0.5)", "{0} * 0.5", "0.3 - {0}", "F.relu6({0} * 3)", "{0} * torch.tensor(0.5)",
    "{0} * ({0} > 0)", "torch.square({0}) / 3",
)  # fmt: skip
VIEWS = (
    "{0}.transpose(-1, -2)", "{0}.unflatten(-1, (2, -1))", "{0}.unflatten(-1, (-1, 2))", "{0}[..., 1:]",
    "{0}[..., :-1]", "{0}[..., ::2]", "{0}.chunk(2, -1)[1]", "{0}.flip(-1)", "{0}.flip(-2)", "{0}.roll(1, -1)",
    "{0}.roll(-2, -2)", "{0}[..., None]", "{0}.unsqueeze(AXIS0)", "{0}.select(-1, 1)", "{0}.select(-2, 0)",
    "{0}.movedim(-1, AXIS0)", "{0}[..., :1].expand_as({0})", "{0}.narrow(-1, 1, 2)", "{0}.flatten(-2)",
    "{0}.unsqueeze(-1).expand(*{0}.shape, 2)", "{0}.contiguous()", "{0}.transpose(-1, -2).contiguous()",
    "{0}.reshape(*{0}.shape[:-2], -1)", "{0}.unbind(-1)[0]", "{0}.split(2, -1)[0]",
    "{0}.unsqueeze(-2).expand(*{0}.shape[:-1], 3, -1)",
)  # fmt: skip
SUMS = (
    "{0}.sum({1})", "{0}.mean({1})", "{0}.amax({1})", "{0}.amin({1})", "{0}.sum({1}, keepdim=True)",
    "{0}.mean({1}, keepdim=True)", "{0}.amax({1}, keepdim=True)", "{0}.amin({1}, keepdim=True)", "{0}.cumsum({1}) / 3",
    "torch.softmax({0}, {1})", "torch.logsumexp({0}, {1})", "torch.log_softmax({0}, {1})", "{0}.var({1}, keepdim=True)",
    "(0.1 + {0}.var({1}, unbiased=False)).sqrt()", "F.normalize({0} + 1.5, dim={1})",
    "({0} > 0).sum({1}, keepdim=True) * {0}",
    "{0}.sum((-1, -2))", "{0}.mean((-1, -2))", "{0}.amax((-1, -2))", "F.layer_norm({0}, {0}.shape[-1:])",
)  # fmt: skip
JOINS = (
    "F.pad({0}, (1, 0))", "F.pad({0}, (2, 1), value=0.5)", "F.pad({0}, (-1, 1))", "F.pad({0}, (0, 0, 1, 0))",
    "torch.cat([{0}, {1}], -1)", "torch.stack([{0}, {1}], -1)", "torch.stack([{0}, {1}], AXIS0)",
    "torch.cat([{0}.flip(-1), {1}[..., :1]], -1)",
)  # fmt: skip
PAIRS = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.where({0} > {1}, {0}, {1} / 2)", "{0} / (1 + {1} ** 2)", "torch.lerp({0}, {1}, 0.3)",
    "torch.addcmul({0}, {0}, {1})",
    "torch.where(({0} > 0) & ({1} < 0.3), {0}, {1})", "torch.where(({0} > 0) * ({1} > 0) | ~({0} > -1), {1}, {0} * 2)",
    "{0} * torch.sigmoid({1})",
)  # fmt: skip
ALONE = (  # of a parameter: whatever torch can do
    "{0}.sort(-1)[0]", "{0}.cumprod(-1)", "torch.fft.fft({0}).real", "torch.fft.fft({0}).imag / 3", "{0}.mT - {0}",
    "{0}.mT", "torch.tril({0})", "{0} @ {0}.mT / 3", "torch.linalg.inv({0} + 4 * torch.eye(SIZE, dtype={0}.dtype))",
    "torch.matrix_exp(({0} - {0}.mT) / 2)", "{0}.diagonal(0, -1, -2)", "{0} / {0}.shape[-1] ** 0.5",
    "{0}.softmax(0)", "torch.linalg.norm({0}, dim=-1, keepdim=True)", "{0} * torch.arange(SIZE)", "{0}.topk(2, -1)[0]",
    "torch.outer({0}.flatten()[:6], {0}.flatten()[-5:]) / 3", "{0}.mT * 2",
    "F.group_norm({0}[None], {0}.shape[0])[0]", "{0}.mT.tanh()", "2 * {0}.mT", "{0}.flip(0)",
)  # fmt: skip
STATES = {
    "plain": "state: B D", "variables": "state: B 2 D", "heads": "state: B H K",
    "stacked": "state.f: B D, state.g: B D", "joined": "state.f: B D, state.g: B H K",
}  # fmt: skip
STATE_VALUES = {
    "plain": {"s": "state"}, "variables": {"s": "state[:, 0]", "t": "state[:, 1]"}, "heads": {"s": "state"},
    "stacked": {"s": "state.f", "t": "state.g"}, "joined": {"s": "state.f", "t": "state.g"},
}  # fmt: skip


class Pair(NamedTuple):
    f: Tensor
    g: Tensor


class Value(NamedTuple):
    name: str
    batched: bool


class Draw:
    """The source of a random step, and its declaration. The first ones are short, so that they compile fast."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kind = self.random.choice(list(STATES))
        self.gated = self.random.choice(["no", "given", "left out"])
        self.lines: list[str] = []
        self.values: list[Value] = []
        shapes = {**{n: f"B {axes}" for n, axes in TIMED.items()}, **PARAMETERS, "state": ""}
        del shapes["state"]
        self.scope: dict[str, Any] = {"torch": torch, "F": F, "Pair": Pair, "scale": 2.0, "way": "sin"}
        self.scope |= {name: self.numbers(axes, SIZES) for name, axes in shapes.items()}
        if self.gated != "no":
            self.scope["gate"] = self.numbers("B D", SIZES) if self.gated == "given" else None
        self.scope["state"] = self.state(SIZES["B"], SIZES)
        self.values += [Value(name, True) for name in TIMED] + [Value(name, False) for name in PARAMETERS]
        for name, source in STATE_VALUES[self.kind].items():
            self.line(name, source if self.random.random() < 0.85 else f"{source}.detach()", batched=True)
        if self.gated == "given":
            self.values.append(Value("gate", True))
        for _ in range(self.random.randint(1, 2) if seed < SHORT else self.random.randint(2, 4)):
            self.grow(batched=False)
        for _ in range(self.random.randint(2, 3) if seed < SHORT else self.random.randint(4, 8)):
            self.grow(batched=True)
        if self.random.random() < 0.2:
            self.branch()
        self.finish()

    def numbers(self, axes: str, sizes: Mapping[str, int]) -> Tensor:
        shape = [int(axis) if axis.isdigit() else sizes[axis] for axis in axes.split()]
        return torch.randn(shape, generator=self.generator, dtype=torch.float64) / (2 if len(shape) > 1 else 1)

    def state(self, rows: int, sizes: Mapping[str, int]) -> Any:
        parts = [each.partition(":")[2] for each in STATES[self.kind].split(",")]
        found = [self.numbers(axes, {**sizes, "B": rows}) for axes in parts]
        return Pair(*found) if len(found) > 1 else found[0]

    def numbers_of_a_row(self) -> int:
        """Return the most numbers that one row of a value has, or a parameter."""
        return max(self.scope[name].numel() // (SIZES["B"] if batched else 1) for name, batched in self.values)

    # --- lines

    def line(self, name: str, source: str, *, batched: bool) -> bool:
        """Add a line if it runs and its value is of moderate size and shape."""
        try:
            value = eval(source, self.scope)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        inner = value.ndim - batched
        rows = not batched or (value.ndim > 0 and value.shape[0] == SIZES["B"])
        if (
            not rows
            or inner > 3
            or value.numel() > NUMBERS * SIZES["B"]
            or not value.numel()
            or not value.is_floating_point()
        ):
            return False
        if not batched and inner < 1:
            return False
        if not value.isfinite().all() or value.abs().max() > 8:
            return False
        self.scope[name] = value
        self.lines.append(f"{name} = {source}")
        self.values.append(Value(name, batched))
        return True

    def pick(self, batched: bool) -> Value:
        """Choose a value, the younger the likelier."""
        some = [value for value in self.values if value.batched == batched]
        return self.random.choices(some, [1 + i for i in range(len(some))])[0]

    def rank(self, value: Value) -> int:
        return self.scope[value.name].ndim - value.batched

    def grow(self, *, batched: bool) -> None:
        kinds: list[Callable[[bool], str | None]] = [self.element, self.view, self.sum, self.join, self.pair]
        kinds += [self.pair, self.product, self.product] if batched else [self.alone, self.alone]
        for _ in range(40):
            source = self.random.choice(kinds)(batched)
            if source is not None and self.line(f"n{len(self.values)}", source, batched=batched):
                return

    def form(self, forms: tuple[str, ...], batched: bool, *names: Any) -> str:
        text = self.random.choice(forms).format(*names)
        return text.replace("AXIS0", str(int(batched)))

    def element(self, batched: bool) -> str:
        return self.form(ELEMENT, batched, self.pick(batched).name)

    def view(self, batched: bool) -> str | None:
        value = self.pick(batched)
        text = self.form(VIEWS, batched, value.name)
        return None if self.rank(value) < (2 if "-2" in text or "movedim" in text else 1) else text

    def sum(self, batched: bool) -> str | None:
        value = self.pick(batched)
        rank = self.rank(value)
        if not rank:
            return None
        text = self.form(SUMS, batched, value.name, -self.random.randint(1, rank))
        return None if rank < 2 and "-2" in text else text

    def join(self, batched: bool) -> str | None:
        value = self.pick(batched)
        like = [each for each in self.values if self.alike(each, value, batched)]
        text = self.form(JOINS, batched, value.name, self.random.choice(like).name)
        return None if self.rank(value) < (2 if "0, 0, 1" in text else 1) else text

    def alike(self, value: Value, other: Value, batched: bool) -> bool:
        return value.batched == batched and self.scope[value.name].shape == self.scope[other.name].shape

    def pair(self, batched: bool) -> str | None:
        first = self.pick(batched)
        own = self.scope[first.name]
        fitting = []
        for value in self.values:
            other = self.scope[value.name]
            shape = other.shape if value.batched else (1, *other.shape) if batched else other.shape
            if (value.batched and not batched) or (batched and other.ndim + (not value.batched) > own.ndim):
                continue
            inner = shape[1:] if value.batched else other.shape
            mine = own.shape[1:] if batched else own.shape
            if value.batched and len(inner) != len(mine):
                continue
            if all(n in (1, m) for n, m in zip(reversed(inner), reversed(mine), strict=False)):
                fitting.append(value)
        if not fitting:
            return None
        names = [first.name, self.random.choice(fitting).name]
        self.random.shuffle(names)
        return self.form(PAIRS, batched, *names)

    def alone(self, batched: bool) -> str | None:
        value = self.pick(False)
        text = self.form(ALONE, False, value.name)
        size = f"{value.name}.shape[-1]"
        return text.replace("SIZE", size)

    def product(self, batched: bool) -> str | None:
        """Multiply with a matrix: by @, F.linear or einsum with its letters in any order."""
        left = self.pick(True)
        rank, own = self.rank(left), self.scope[left.name]
        if not rank:
            return None
        matrices = []
        for value in self.values:
            of = self.scope[value.name]
            if value.batched or of.ndim not in (2, 3):
                continue
            matrices += [(value.name, way) for way in ("as it is", "turned") if self.fits(of, own, way)]
        if not matrices:
            return None
        name, way = self.random.choice(matrices)
        grouped = self.scope[name].ndim == 3
        if not grouped and self.random.random() < 0.5:
            if way == "turned":
                return self.random.choice([f"{left.name} @ {name}.T", f"F.linear({left.name}, {name})"])
            return f"{left.name} @ {name}"
        letters = "bghi"[:rank] + "k" if not grouped else "bg" + "hi"[: rank - 2] + "k"
        groups = "g" if grouped else ""
        matrix = groups + ("km" if way == "as it is" else "mk")
        if grouped and self.random.random() < 0.3:
            order = list("gkm")
            self.random.shuffle(order)
            permuted = f"{name}.permute({', '.join(str(matrix.index(o)) for o in order)})"
            name, matrix = permuted, "".join(order)
        out = letters[1:-1] + "m"
        rest = list(out)
        self.random.shuffle(rest)
        out = "b" + (out if self.random.random() < 0.5 else "".join(rest))
        first = list(letters)
        self.random.shuffle(first)
        turned = f"{left.name}.permute({', '.join(str(letters.index(o)) for o in first)})"
        if self.random.random() < 0.3:
            return f'torch.einsum("{"".join(first)},{matrix}->{out}", {turned}, {name})'
        if self.random.random() < 0.3:
            return f'torch.einsum("{matrix},{letters}->{out}", {name}, {left.name})'
        return f'torch.einsum("{letters},{matrix}->{out}", {left.name}, {name})'

    @staticmethod
    def fits(matrix: Tensor, left: Tensor, way: str) -> bool:
        terms = matrix.shape[-2] if way == "as it is" else matrix.shape[-1]
        if matrix.ndim == 3 and (left.ndim < 3 or left.shape[1] != matrix.shape[0]):
            return False
        return left.shape[-1] == terms

    def branch(self) -> None:
        """A branch on an option, and a number that is one."""
        value = self.pick(True).name
        self.line(f"n{len(self.values)}", f'torch.sin({value}) if way == "sin" else {value} / scale', batched=True)

    # --- results

    def fitted(self, name: str, axes: str) -> str:
        """Return a value with these axes, made from any value of the batch."""
        shape = [int(axis) if axis.isdigit() else SIZES[axis] for axis in axes.split()]
        inner = list(self.scope[name].shape[1:])
        if inner == shape:
            return name
        if inner[-len(shape) :] == shape:
            return f"{name}.sum({tuple(range(1, 1 + len(inner) - len(shape)))})"
        if inner == shape[::-1]:
            return f"{name}.transpose(1, 2)"
        base = {"D": "x", "H K": "z"}[axes]
        mean = f"{name}.reshape({name}.shape[0], -1).mean(-1)[:{', None' * len(shape)}]"
        return f"{mean}.expand_as({base})" if self.random.random() < 0.3 else f"{mean} + {base}"

    def finish(self) -> None:
        fields = [each.partition(":")[2].replace("B", "").split() for each in STATES[self.kind].split(",")]
        parts = [" ".join(axis for axis in axes if axis != "2") for axes in fields]
        parts = parts * 2 if self.kind == "variables" else parts
        found = []
        for i, axes in enumerate(parts):
            base, old, bias = {"D": ("x", ["s", "t"][i], "a"), "H K": ("z", ["s", "t"][i], "c")}[axes]
            new = self.fitted(self.pick(True).name, axes)
            found.append(self.random.choice([
                *[f"torch.tanh({new})"] * 6, f"torch.tanh({new} + {old})", f"torch.sigmoid({new}) * {old}", old, base,
                f"torch.zeros_like({base})", f"{bias}.expand_as({base})", f"torch.tanh({new}).detach()",
                f"torch.where({old} > 0, {base}, -{base})", f"torch.cat([{base}[..., :1], {old}[..., 1:]], -1)",
                f"{bias}.expand_as({base}).tanh()",
            ]))  # fmt: skip
        self.out = self.random.choice(["D", "D", "H K"])
        output = self.fitted(self.pick(True).name, self.out)
        if self.random.random() < 0.2:  # the output is the next state, or a part of it
            self.out, output = parts[0], "after0"
        self.lines += [f"after{i} = {source}" for i, source in enumerate(found)]
        after = {
            "variables": "torch.stack([after0, after1], 1)", "stacked": "Pair(after0, after1)",
            "joined": "Pair(after0, after1)",
        }.get(self.kind, "after0")  # fmt: skip
        self.lines.append(f"return {output}, {after}")

    # --- the cell

    @property
    def source(self) -> str:
        gate = {"no": "", "given": ", gate: torch.Tensor | None", "left out": ", gate: torch.Tensor | None"}[self.gated]
        state = "state: Pair" if self.kind in ("stacked", "joined") else "state"
        operands = ", ".join([*TIMED, *PARAMETERS])
        head = f'def drawn({operands}{gate}, {state}, *, scale: float = 2.0, way: str = "sin"):'
        return "\n    ".join([head, *self.lines])

    def cell(self) -> Cell:
        scope: dict[str, Any] = {"torch": torch, "F": F, "Pair": Pair}
        exec(self.source, scope)
        operands = [f"{name}: B T {axes}" for name, axes in TIMED.items()]
        operands += [f"{name}: {axes}" for name, axes in PARAMETERS.items()]
        operands += ["gate?: B T D"] if self.gated != "no" else []
        declaration = f"{', '.join(operands)}, {STATES[self.kind]} -> B T {self.out}"
        return Cell(scope["drawn"], declaration, equation="", source="")

    def operands(self, dtype: torch.dtype, packed: bool) -> dict[str, Any]:
        batch = 1 if packed else SIZES["B"]
        sizes = {**SIZES, "B": batch}
        found = {name: self.numbers(f"B T {axes}", sizes) for name, axes in TIMED.items()}
        found |= {name: self.numbers(axes, sizes) for name, axes in PARAMETERS.items()}
        if self.gated == "given":
            found["gate"] = self.numbers("B T D", sizes)
        found["state"] = self.state(len(PACKED) - 1 if packed else batch, sizes)
        return pytree.tree_map(lambda value: value.to(dtype), found)


PACKED = [0, 1, 1, 4]


def _loss(values: Sequence[Tensor]) -> Tensor:
    weighted = [(v * torch.linspace(-1, 1, v.numel(), dtype=v.dtype).cos().view_as(v)).sum() for v in values]
    return torch.stack(weighted).sum()


def _same(value: Tensor) -> Tensor:
    return value


def _results(
    op: Cell,
    operands: Mapping[str, Any],
    more: Mapping[str, Any],
    backend: str,
    *,
    change: Callable[[Tensor], Tensor] = _same,
    second: bool = False,
) -> dict[str, Tensor]:
    """Return the outputs, the last state and all gradients; `second` for the gradients of gradients, too.

    change: of the outputs and of the last state, before the loss.
    """
    operands = laws.differentiable(operands)
    leaves = laws.leaves(operands)
    y, last = op(**operands, **more, backend=backend)
    results = [change(each) for each in (y, *pytree.tree_leaves(last))]
    values = {f"result {i}": each for i, each in enumerate(results)}
    for order in "d", "dd":
        loss = _loss(results)
        results = [torch.zeros_like(leaf) for leaf in leaves.values()]
        if loss.requires_grad:
            wanted = list(leaves.values())
            results = list(torch.autograd.grad(loss, wanted, create_graph=second, materialize_grads=True))
        values |= {f"{order}{name}": grad for name, grad in zip(leaves, results, strict=True)}
        if not second:
            break
    return values


def _call(seed: int, dtype: torch.dtype) -> tuple[Draw, Cell, dict[str, Any], dict[str, Any]]:
    """Return a random cell, its operands, and the options of a call."""
    draw = Draw(seed)
    more: dict[str, Any] = {"reverse": seed % 3 == 0, "way": ("sin", "other")[seed // 2 % 2]}
    if seed % 5 == 0:
        more["cu_seqlens"] = torch.tensor(PACKED)
    return draw, draw.cell(), draw.operands(dtype, "cu_seqlens" in more), more


class Held(NamedTuple):
    """A call of a random cell, what it gives in float64 by the loop, and the rounding of the loop in float32."""

    draw: Draw
    operands: dict[str, Any]
    more: dict[str, Any]
    exact: dict[str, Tensor]
    rounding: float


@functools.cache
def _held(seed: int) -> Held:
    """All backends are held to the same numbers."""
    draw, op, operands, more = _call(seed, (torch.float64, torch.float32)[seed % 2])
    narrow = laws.mapped(lambda value: value.float(), operands)
    rounding = float(draw.numbers_of_a_row())  # the sum of n numbers in another order differs by up to n roundings
    for _ in range(laws.DRAWS):
        errors = _results(op, narrow, more, "reference"), _results(op, laws.wide(narrow), more, "reference")
        rounding = max(rounding, laws.worst(*errors))
        narrow = laws.mapped(lambda value: laws.moved(value, 2.0**-10, draw.generator), narrow)
    return Held(draw, operands, more, _results(op, laws.wide(operands), more, "reference"), rounding)


def _check(seed: int, backend: str) -> bool:
    """Compare a random cell with the loop. Return False if it has no numbers to be held to, or cannot run."""
    draw, operands, more, exact, rounding = _held(seed)
    op = draw.cell()  # its own kernels
    given = {key: value for key, value in more.items() if key != "reverse"}
    line = next(line for line in op.explain(**operands, **given).splitlines() if line.startswith(backend))
    reason = line.removeprefix(f"{backend}: ").removeprefix("device cpu (runs on cuda); ")
    if backend == "cpu":
        assert reason == "can run", f"{seed}: {reason}\n{draw.source}"
    elif reason not in ("can run", "device cpu (runs on cuda)"):
        return False
    if not rounding < 1e4:  # a comparison is decided by rounding
        return False
    for name, value in _results(op, operands, more, backend).items():
        try:
            laws.close(value, exact[name], rounding, name)
        except AssertionError as error:
            raise AssertionError(f"{seed}: {error}\n{draw.source}") from None
    return True


@pytest.fixture
def _in_python(monkeypatch):
    """Kernels for a CPU run by Python, not by numba."""
    kernels_in_python.use(monkeypatch)


@pytest.mark.usefixtures("_in_python")
@pytest.mark.parametrize("first", SOME)
def test_kernels_for_a_cpu_in_python(first):
    assert sum(_check(seed, "cpu") for seed in range(first, first + 20)) >= 16


@pytest.mark.parametrize("first", range(0, SHORT, 20))
def test_kernels_for_a_cpu(first):
    """To compile one takes more than a second, so each fifth is compiled here."""
    assert sum(_check(seed, "cpu") for seed in range(first, first + 20, 5)) >= 3


@pytest.mark.usefixtures("_in_python")
@pytest.mark.parametrize("first", range(1, SHORT, 15))
def test_second_derivatives(first):
    """Those of a kernel are the loop's."""
    for seed in range(first, first + 15, 3):
        _, op, operands, more = _call(seed, torch.float64)
        kernel, loop = (_results(op, operands, more, backend, second=True) for backend in ("cpu", "reference"))
        torch.testing.assert_close(kernel, loop, msg=lambda text, seed=seed: f"{seed}: {text}")


@pytest.mark.usefixtures("_in_python")
@pytest.mark.parametrize("first", range(0, SHORT, 15))
def test_results_may_be_changed_in_place(first):
    """The outputs and each field of the last state: gradients are those of copies."""
    for seed in range(first, first + 15, 2 if laws.ALL else 4):
        _, op, operands, more = _call(seed, torch.float64)
        kernel = _results(op, operands, more, "cpu", change=lambda value: value.mul_(0.5))
        loop = _results(op, operands, more, "reference", change=lambda value: value * 0.5)
        torch.testing.assert_close(kernel, loop, msg=lambda text, seed=seed: f"{seed}: {text}")


@pytest.mark.usefixtures("_in_python")
@pytest.mark.parametrize("first", range(0, SHORT, 15))
def test_nan(first):
    """A kernel gives NaN where the loop does.

    A gradient is NaN in some more places: where the state has no gradient, a kernel multiplies zeros by NaN.
    """
    for seed in range(first, first + 15, 2 if laws.ALL else 4):
        draw, op, operands, more = _call(seed, torch.float64)
        for name in ("x", "z"):
            operands[name].view(-1)[draw.random.randrange(operands[name].numel())] = torch.nan
        kernel, loop = (_results(op, operands, more, backend) for backend in ("cpu", "reference"))
        for name, value in loop.items():
            gone = kernel[name].isnan()
            assert torch.equal(gone, value.isnan()) if name.startswith("result") else not (value.isnan() & ~gone).any()
            torch.testing.assert_close(kernel[name][~gone], value[~gone], msg=lambda text, seed=seed: f"{seed}: {text}")


@pytest.mark.parametrize("first", SOME)
def test_kernels_for_a_gpu(first):
    """In the interpreter. Some steps have no tiles; docs/cell_kernels.md says which kinds."""
    pytest.importorskip("triton")
    assert sum(_check(seed, "triton") for seed in range(first, first + 20)) >= 5


@pytest.mark.long
@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("first", range(SHORT, 1000, 47))
def test_many(first, backend):
    pytest.importorskip("triton")
    checked = sum(_check(seed, backend) for seed in range(first, first + 47))
    assert checked >= (40 if backend == "cpu" else 10)


def _alone(step: Callable[..., Any], name: str = "step") -> Cell:
    def made(x, w, a, state):
        found = step(x, w, a, state)
        return found if isinstance(found, tuple) else (found, found)

    made.__name__ = name
    return Cell(made, "x: B T D, w: D D, a: D, state: B D -> B T D", equation="", source="")


STEPS = {
    "turned, less itself": lambda x, w, a, s: torch.tanh(x + s @ (w.T - w)),
    "einsum of turned": lambda x, w, a, s: torch.tanh(x + torch.einsum("bd,ed->be", s, w * w.sin())),
    "twice": lambda x, w, a, s: torch.tanh(x @ w + s @ (2 * w.T) + w.sum(1)),
    "softmax of turned": lambda x, w, a, s: torch.tanh(x + s @ w.T.softmax(0)),
    "no path": lambda x, w, a, s: torch.where(s > 0, x, -x),
    "detached": lambda x, w, a, s: torch.tanh(x + s.detach() @ w),
    "no memory": lambda x, w, a, s: (x * a, x),
    "a parameter follows": lambda x, w, a, s: (x * a, a.expand_as(x)),
    "clamped parameter": lambda x, w, a, s: torch.tanh(x + s * a.clamp(-1, 1)),
    "where on a parameter": lambda x, w, a, s: torch.tanh(x + s * torch.where(a > 0, a, 0.0)),
    "complex parameter": lambda x, w, a, s: torch.tanh(x + s * torch.fft.fft(a).real + torch.fft.fft(a).conj().imag),
    "sorted parameter": lambda x, w, a, s: torch.tanh(x + s * a.sort()[0] + a.cumprod(0)),
    "inverse": lambda x, w, a, s: torch.tanh(x + s @ torch.linalg.inv(w + 4 * torch.eye(w.shape[0], dtype=w.dtype))),
    "padded": lambda x, w, a, s: torch.tanh(x + F.pad(s, (1, 0))[:, :-1] + F.pad(F.pad(s, (2, 0)), (-1, -1))),
    "a size in a parameter": lambda x, w, a, s: torch.tanh(x + s * (a / a.shape[0] ** 0.5)),
    "integers and truths": lambda x, w, a, s: torch.where(a > 0, s * torch.arange(4), (x > 0) * (s > 0) * x),
    "in place on a parameter": lambda x, w, a, s: _in_place(x, a, s),
    "parts of operands": lambda x, w, a, s: torch.tanh(_twice(x[:, 1:3]) + s[:, :1] @ w[2:3] * a[::3].sum()),
    "no part of a parameter twice": lambda x, w, a, s: torch.cat([s[:, 2:] @ w[:2, 1:3], x[:, :2]], 1) * a[1],
    "means": lambda x, w, a, s: torch.tanh(x - _twice(s.unflatten(1, (2, 2)).mean(1)) + x.mean(-1, keepdim=True)),
    "least": lambda x, w, a, s: x * _twice(s.unflatten(1, (2, 2)).amin(1)) + s.amin(-1, keepdim=True) * a,
    "extremes": lambda x, w, a, s: x - s.amax(-1, keepdim=True) * x.amin(-1, keepdim=True) + s.mean(-1, keepdim=True),
}


def _twice(value):
    return torch.cat([value, value], 1)


def _in_place(x, a, s):
    double = a * 2
    more = double + 1
    double.mul_(3)
    return torch.tanh(x + s * more + double)


@pytest.mark.parametrize("name", ["integers and truths", "where on a parameter", "least"])
def test_compiled_steps(name):
    _hold(_alone(STEPS[name]))


@pytest.mark.usefixtures("_in_python")
@pytest.mark.parametrize("name", STEPS)
def test_steps_that_were_wrong(name):
    _hold(_alone(STEPS[name]))


def _hold(op):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (3, 5, 4), "w": (4, 4), "a": (4,), "state": (3, 4)}
    operands = {key: torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for key, shape in shapes.items()}
    exact, found = (_results(op, operands, {}, backend) for backend in ("reference", "cpu"))
    torch.testing.assert_close(found, exact)


DTYPE = "numbers or branches that depend on the dtype"


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda x, w, a, s: torch.tanh(x + s + torch.finfo(x.dtype).eps), DTYPE),
        (lambda x, w, a, s: x + s if x.dtype == torch.float64 else x - s, DTYPE),
        (lambda x, w, a, s: (x.double() + s).to(x.dtype), "a cast to torch.float64"),
        (lambda x, w, a, s: torch.view_as_real(torch.view_as_complex(x.unflatten(1, (-1, 2))) * 2).flatten(1) + s,
         "operation aten.view_as_complex.default"),
    ],
)  # fmt: skip
def test_what_depends_on_the_dtype_runs_by_the_loop(step, reason):
    op = _alone(step)
    for dtype in (torch.float32, torch.float64):
        x, w, a = torch.ones(2, 3, 4, dtype=dtype) / 3, torch.eye(4, dtype=dtype), torch.ones(4, dtype=dtype)
        assert op.explain(x, w, a).splitlines()[1] == f"cpu: its step uses {reason}"
        torch.testing.assert_close(op(x, w, a), op(x, w, a, backend="reference"), rtol=0, atol=0)


def test_sizes_that_are_near_each_other():
    """D - 1 was read as 6 K / 5 - 49."""

    def near(x, z, state):
        return F.pad(x, (-1, 1)) + z.sum((-1, -2))[:, None], state[:, 1:].sum(-1, keepdim=True) + x

    op = Cell(near, "x: B T D, z: B T H K, state: B D -> B T D", equation="", source="")
    operands = {"x": torch.randn(2, 3, 6), "z": torch.randn(2, 3, 2, 5), "state": torch.randn(2, 6)}
    torch.testing.assert_close(op(**operands, backend="cpu"), op(**operands, backend="reference"))


def test_nan_in_extremes():
    op = _alone(STEPS["extremes"])
    x, w, a = torch.randn(1, 4, 4), torch.eye(4), torch.ones(4)
    x[0, 1, 2] = torch.nan
    y, last = op(x, w, a, backend="cpu")
    torch.testing.assert_close((y, last), op(x, w, a, backend="reference"), equal_nan=True)
    assert y[0, 1].isnan().all()


def test_clear_errors():
    with pytest.raises(ConfigError, match="cell: the step's name is '<lambda>', expected an identifier"):
        _alone(STEPS["no path"], "<lambda>")
    op = Cell(lone, "x: B T, state: B -> B T", equation="", source="")
    with pytest.raises(ConfigError, match=r"lone.solve: state has the axes \(B\), expected another axis"):
        op.solve("newton", torch.ones(2, 3))


def lone(x, state):
    h = torch.tanh(x + state)
    return h, h

"""Count what each layer computes, and the least seconds that this takes on one thread of this processor.

    python benchmarks/speed/floors.py [NAME ...]

NAME is a registered layer or preset. x is (4, 1024, 256) in float32, options are the defaults, and both passes count,
as in layers.py. torch sees every operation, and computes none, as tensors are on its meta device: where the work grows
as T, ops and cells run by their definitions, over 64 steps, whose counts are multiplied; else in plain torch. What
looks at numbers is counted over a few steps that have them.

The floor is the sum of three times, none of which a program can go below that computes the same by the same formulas:

- operations: of products of matrices, and additions and multiplications of single numbers, as if all of them went at
  the speed of large products;
- functions: exponentials and what is made of them, as if each took as long as a sigmoid of numbers in the cache;
- bytes: x, y, the parameters and their gradients, each read or written once at the speed of a copy.

The speeds are measured first. Rows are in benchmarks/results/floors.csv. A ratio is to the time of `torch.nn.LSTM`.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from scanl import layers, ops
from scanl.ops.products.functions import large_products

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, of_module, parse, parser

SHAPE, QUICK = (4, 1024, 256), (2, 64, 16)
FUNCTIONS = """
exp exp2 expm1 sigmoid tanh log log1p log2 sin cos sinh cosh softplus silu silu_backward gelu gelu_backward erf elu mish
mish_backward _safe_softmax log_sigmoid_forward _softmax _log_softmax logsumexp logaddexp pow sqrt rsqrt atan2
"""
STEPS = 64  # that are counted where the work grows as T
ROWS_WITH_NUMBERS = {"implicit": 8}  # steps that are counted with numbers: they decide how often a map is evaluated
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Counts(NamedTuple):
    operations: float
    functions: float


class Counter(TorchDispatchMode):
    """Counts operations and elementary functions of what torch dispatches while it is the context."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.functions = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_") or func.overloadpacket.__name__
        numbers = max((x.numel() for x in (*args, result) if isinstance(x, Tensor)), default=0)
        if func.overloadpacket in flop_registry:
            self.operations += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        elif name.startswith(ATTENTION):
            self._attention(name, args, kwargs or {})
        elif name.startswith("_fft"):
            self.operations += 2.5 * numbers * math.log2(max(2, args[0].shape[args[1][-1]]))
        elif name in FUNCTIONS.split():
            self.functions += numbers
        elif torch.Tag.pointwise in func.tags or torch.Tag.reduction in func.tags:
            self.operations += numbers
        return result

    def _attention(self, name: str, args: Any, kwargs: Any) -> None:
        """Count two products of queries and keys, five in the backward pass; half of them if it is causal."""
        back = name != ATTENTION
        q, k = args[back : back + 2]
        causal = kwargs.get("is_causal", args[7] if back else args[4] if len(args) > 4 else False)
        scores = q.shape[:3].numel() * k.shape[2] / (2 if causal else 1)
        self.operations += (5 if back else 2) * 2 * scores * q.shape[3]
        self.functions += scores


def counted(module: nn.Module, shape: tuple[int, int, int], backends: Sequence[str], device: str = "meta") -> Counts:
    """Count both passes of a module whose ops have these backends."""
    call = of_module(module.to(device), torch.randn(shape, device=device)).both
    assert call is not None
    with ops.backend(*backends), Counter() as counter:
        call()
    return Counts(counter.operations, counter.functions)


def least(call: Callable[[], object], rounds: int = 20) -> float:
    """Return the least seconds of the processor for a call."""
    call()
    took = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        took.append(time.process_time() - begin)
    return min(took)


class Speeds(NamedTuple):
    """Seconds for an operation, an elementary function and a byte."""

    operation: float
    function: float
    byte: float

    def floor(self, counts: Counts, size: float) -> float:
        return counts.operations * self.operation + counts.functions * self.function + size * self.byte


def speeds() -> Speeds:
    x, weight = torch.randn(2048, 1024), torch.randn(1024, 1024)
    few, many = torch.randn(16, 1024), torch.randn(2, 1 << 23)
    with large_products(len(x)), torch.no_grad():
        product = least(lambda: nn.functional.linear(x, weight))
    sigmoid = least(lambda: [torch.sigmoid(few) for _ in range(100)])
    copy = least(lambda: many[0].copy_(many[1]))
    return Speeds(product / (2 * x.numel() * len(weight)), sigmoid / (100 * few.numel()), copy / (4 * many.numel()))


def of_lstm(shape: tuple[int, int, int]) -> float:
    """Return the seconds of both passes of `nn.LSTM`."""
    call = of_module(nn.LSTM(shape[2], shape[2], batch_first=True), torch.randn(shape)).both
    assert call is not None
    return least(call, 5)


def run(results: Results, name: str, shape: tuple[int, int, int], speed: Speeds, lstm: float) -> None:
    if results.timed(name=name, shape=str(shape)):
        return
    torch.manual_seed(0)
    layer = layers.build(name, shape[2])
    linear = type(layer).cost[0] == "T"
    parts, backends = (max(1, shape[1] // STEPS), ["reference"]) if linear else (1, ["parallel", "reference"])
    if name in ROWS_WITH_NUMBERS:
        rows = ROWS_WITH_NUMBERS[name]
        parts, counts = shape[0] * shape[1] // rows, counted(layer, (1, rows, shape[2]), ["reference"], "cpu")
    else:
        counts = counted(layer, (shape[0], shape[1] // parts, shape[2]), backends)
    counts = Counts(*(parts * count for count in counts))
    size = 4 * (4 * math.prod(shape) + 2 * sum(weight.numel() for weight in layer.parameters()))
    floor = speed.floor(counts, size)
    results.add(
        name=name, shape=str(shape), operations=counts.operations, functions=counts.functions, bytes=float(size),
        seconds=floor, base="torch.nn.LSTM", ratio=floor / lstm,
    )  # fmt: skip


def main() -> None:
    options = parse(parser(__doc__, layers.names()))
    results, speed = Results("floors", options), speeds()
    print("nanoseconds: " + ", ".join(f"{name} {1e9 * each:.4f}" for name, each in speed._asdict().items()))
    shape = QUICK if options.quick else SHAPE
    lstm = of_lstm(shape)
    for name in options.names:
        run(results, name, shape, speed, lstm)


if __name__ == "__main__":
    main()

"""What one step of training would take on 8 to 4,096 GPUs, by the form in which they share it: predictions.

    python benchmarks/speed/forms.py

`benchmarks/plans.py` predicts it from the sizes of two models and from what a GPU and a network can do. Nothing runs
here. The speed of the products and of the ops was measured on one GPU (benchmarks/results/gpu.csv); the network is that
of the sources below. The rows are in benchmarks/results/forms.csv, and docs/many_gpus.png shows them.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import plans
from cost import Link
from harness import Panel, Results, Row, parse, parser, picture, text, write
from plans import Machine, Model, Step

GPUS = tuple(2**n for n in range(3, 13))
TOKENS = tuple(2**n for n in range(20, 31, 2))
RECURRENT: dict[str, Callable[..., Step | None]] = {
    "sequence, in rounds": plans.sequence,
    "sequence, all-gather": partial(plans.sequence, exchange="all-gather"),
    "pipeline in time": plans.pipeline,
    "tensor": plans.tensor,
}
SOFTMAX: dict[str, Callable[..., Step | None]] = {
    "softmax, ring": plans.ring_attention,
    "softmax, Ulysses": plans.ulysses,
}


def measured() -> Results:
    return Results("gpu")


def op_seconds(name: str, tokens: int, way: str) -> float:
    """Return the seconds a token of an op on a GPU, where a row of `tokens` has been measured."""
    (row,) = measured().of(name=name, program="triton", way=way, dtype="bfloat16")
    return float(row["seconds"]) / tokens


def op(name: str, heads: float = 1.0) -> dict[str, float]:
    """Return the fields of a model that its op says. heads: those of the model by those of the row."""
    forward, both = (heads * op_seconds(name, 8 * 2048, way) for way in ("forward", "both"))
    return {"op_forward": forward, "op_backward": both - forward}


def models() -> dict[str, Model]:
    """The sizes of https://huggingface.co/fla-hub/delta_net-1.3B-100B and .../state-spaces/mamba2-1.3b."""
    width = 2048
    return {
        "delta rule": Model(
            parameters=2 * 32_000 * width + 24 * (4 * width**2 + 3 * width * 5632),
            depth=24, width=width, heads=16, state=4 * 16 * 128 * 128, carry=4 * 16 * 128 * 128, **op("delta_rule"),
        ),
        "mamba2": Model(
            parameters=50_288 * width + 48 * width * (3 * 4096 + 2 * 128 + 64),
            depth=48, width=width, heads=64, state=4 * 64 * 128 * 64, carry=4 * 64 * 128 * 64,
            **op("linear_attention-mamba2", heads=2),
        ),
    }  # fmt: skip


def machine() -> Machine:
    """H100 GPUs, 8 to a node.

    Bytes a second of a GPU to one other: in a node 380 GB/s, measured (https://github.com/NVIDIA/nccl/issues/1264; 450
    in theory); to another node 50 GB/s, by its ConnectX-7 of 400 Gb/s (NVIDIA DGX H100 user guide). Latencies: 8.4 µs
    and 3.4 or 9.6 µs for a step, by which NCCL chooses its algorithms (NVIDIA/nccl, src/graph/tuning.cc, ring, simple).
    """
    copy, product = (
        float(measured().of(name="ceiling", program=program)[0]["rate"]) for program in ("copy", "bfloat16 product")
    )
    (attention,) = measured().of(name="delta_rule", program="attention", way="forward", dtype="bfloat16")
    operations = 2 * 8 * 2048**2 * 16 * 128  # causal: half of the pairs
    return Machine(
        flops=1e12 * product, attention=operations / float(attention["seconds"]), copy=1e9 * copy, memory=80e9, node=8,
        near=Link(11.8e-6, 380e9), far=Link(18e-6, 50e9),
    )  # fmt: skip


def rows() -> list[Row]:
    """Return a row for each model, form, number of GPUs and of tokens that is possible."""
    gpus_, made = machine(), []
    for name, model in models().items():
        first = name == "delta rule"  # the other shows what changes with a larger op
        forms = RECURRENT | SOFTMAX if first else RECURRENT
        for tokens, form, gpus in itertools.product(TOKENS if first else TOKENS[:1], forms, GPUS):
            step = forms[form](model, gpus_, gpus, tokens)
            if step is None:
                continue
            work = step.products + (step.ops if form in SOFTMAX else plans.alone(model, gpus_, tokens / gpus).ops)
            values = {
                "model": name, "form": form, "gpus": gpus, "tokens": tokens, "seconds": step.seconds,
                "efficiency": work / step.seconds, "products": step.products, "ops": step.ops, "waiting": step.waiting,
                "received": float(step.received), "memory": float(step.memory),
                "fits": "yes" if step.memory <= gpus_.memory else "no",
            }  # fmt: skip
            made.append({key: text(value) for key, value in values.items()})
    return made


def draw(results: Results) -> None:
    """Draw the share of its time that a GPU works for the model, and the seconds of a step, where memory holds it."""

    def lines(value: str, along: str, **key: object) -> dict[str, list[tuple[float, float]]]:
        points = {
            form: [
                (float(row[along]), float(row[value]))
                for row in results.of(model="delta rule", form=form, fits="yes", **key)
            ]
            for form in RECURRENT | SOFTMAX
        }
        return {form: each for form, each in points.items() if each}

    few, middle, most = TOKENS[0], TOKENS[len(TOKENS) // 3], GPUS[-1]
    panels = [
        Panel(f"{power(few)} tokens", "GPUs", "efficiency", lines("efficiency", "gpus", tokens=few), "x"),
        Panel(f"{power(few)} tokens", "GPUs", "seconds of a step", lines("seconds", "gpus", tokens=few), "xy"),
        Panel(f"{power(middle)} tokens", "GPUs", "efficiency", lines("efficiency", "gpus", tokens=middle), "x"),
        Panel(f"{most:,} GPUs", "tokens", "efficiency", lines("efficiency", "tokens", gpus=most), "x"),
    ]
    picture(results.pictures / "many_gpus.png", panels)


def power(number: int) -> str:
    return f"2^{number.bit_length() - 1}"


def main() -> None:
    results = Results("forms", parse(parser(__doc__)))
    results.rows = rows()
    write(results.path, results.rows)
    print(f"written: {results.path}, {len(results.rows)} rows")
    draw(results)


if __name__ == "__main__":
    main()

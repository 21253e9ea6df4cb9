"""One of several processes that divide a sequence, `python process.py RANK SIZE STORE WHAT ...`: 0 if all is right."""

import copy
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from scanl import ops
from scanl.errors import ConfigError, ProcessError
from scanl.models import LanguageModel, Stack
from scanl.parallel import ContextParallel, context, scan, stretch, stretch_offsets
from scanl.parallel.ranks import RankGroup, received_bytes

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])
LENGTHS = {2: [5, 8], 3: [4, 7, 2], 4: [3, 6, 1, 3]}[SIZE]
STEPS = sum(LENGTHS)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def operands():
    """The operands of each op that has summaries, where those of the first dict have steps; and the initial state."""
    q, k, v = random(2, STEPS, 2, 3), random(2, STEPS, 2, 3) / 3, random(2, STEPS, 2, 4)
    beta = torch.rand(2, STEPS, 2, dtype=torch.float64)
    memory, vectors, x = random(2, 2, 3, 4), random(2, 3), random(2, STEPS, 3)
    yield ops.linear_scan, {"x": x, "a": torch.rand(2, STEPS, 3, dtype=torch.float64)}, {}, vectors
    yield ops.linear_attention, {"q": q, "k": k, "v": v, "g": -torch.rand_like(k)}, {}, memory
    yield ops.delta_rule, {"q": q, "k": k, "v": v, "beta": beta}, {}, memory
    yield (
        ops.dplr_scan,
        {"q": q, "k": k, "v": v, "a": -k, "b": k * beta[..., None], "g": -torch.rand_like(k)},
        {},
        memory,
    )
    b, c = random(2, STEPS, 4), random(2, STEPS, 4)
    timed = {"u": x, "delta": torch.rand_like(x), "B": b, "C": c}
    yield ops.selective_scan, timed, {"A": -torch.rand(3, 4, dtype=torch.float64)}, random(2, 3, 4)
    yield ops.weighted_average, {"k": x, "v": random(2, STEPS, 3)}, {"decay": -torch.rand(3, dtype=torch.float64)}, None
    yield ops.short_convolution, {"x": x}, {"w": random(3, 4)}, random(2, 3, 3)
    yield ops.elman, {"x": x}, {"u": random(3, 3)}, vectors


def learned(values):
    return {name: value.clone().requires_grad_() for name, value in values.items()}


def close(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}")


def every_op():
    for op, timed, fixed, start in operands():
        whole = learned({**timed, **fixed} | ({} if start is None else {op.state: start}))
        y, last = op(**whole)
        dy, d_last = torch.randn_like(y), torch.randn_like(last)
        ((y * dy).sum() + (last * d_last).sum()).backward()
        own = learned({name: stretch(value, RANK, SIZE, lengths=LENGTHS) for name, value in timed.items()} | fixed)
        if RANK == 0 and start is not None:
            own[op.state] = start.clone().requires_grad_()
        part, after = scan(op, **own)
        close(part, stretch(y, RANK, SIZE, lengths=LENGTHS), op.name)
        loss = (part * stretch(dy, RANK, SIZE, lengths=LENGTHS)).sum()
        if RANK == SIZE - 1:
            close(after, last, op.name)
            loss = loss + (after * d_last).sum()
        loss.backward()
        for name in own:
            gradient = own[name].grad
            if name in fixed:
                dist.all_reduce(gradient)
            expected = stretch(whole[name].grad, RANK, SIZE, lengths=LENGTHS) if name in timed else whole[name].grad
            close(gradient, expected, f"{op.name}, gradient of {name}")


def reverse():
    """The last rank is the first one, and has the state."""
    x, a, state = random(2, STEPS, 3), torch.rand(2, STEPS, 3, dtype=torch.float64), random(2, 3)
    y, last = ops.linear_scan(x, a, state, reverse=True)
    own = [stretch(value, RANK, SIZE, lengths=LENGTHS) for value in (x, a)]
    part, after = scan(ops.linear_scan, *own, state if RANK == SIZE - 1 else None, reverse=True)
    close(part, stretch(y, RANK, SIZE, lengths=LENGTHS), "reverse")
    if RANK == 0:
        close(after, last, "reverse, last state")
    answers = RankGroup(None).reversed().everyone(torch.tensor([RANK]))
    assert [int(answer) for answer in answers] == [*reversed(range(SIZE))]


def hybrid():
    """A language model of layers of both kinds, on packed sequences."""
    torch.manual_seed(1)
    names = ("gated_deltanet", "hawk", "gru", "attention", "mamba")
    model = LanguageModel(16, Stack(16, 5, names)).double()
    twin = LanguageModel(16, Stack(16, 5, names)).double()
    twin.load_state_dict(model.state_dict())
    tokens, targets, cu_seqlens = (
        torch.randint(16, (1, STEPS)),
        torch.randint(16, (1, STEPS)),
        torch.tensor([0, 4, 6, STEPS]),
    )
    logits, _ = model(tokens, cu_seqlens=cu_seqlens)
    torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum").backward()
    parallelize_module(twin, DeviceMesh("cpu", list(range(SIZE))), ContextParallel())
    start = sum(LENGTHS[:RANK])
    own = stretch_offsets(cu_seqlens, start, start + LENGTHS[RANK])
    part, _ = twin(stretch(tokens, RANK, SIZE, lengths=LENGTHS), cu_seqlens=own)
    close(part, stretch(logits, RANK, SIZE, lengths=LENGTHS), "logits")
    answers = stretch(targets, RANK, SIZE, lengths=LENGTHS)
    torch.nn.functional.cross_entropy(part[0], answers[0], reduction="sum").backward()
    for (name, weight), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        dist.all_reduce(other.grad)
        close(other.grad, weight.grad, name)


def counted():
    """The bytes are those of the formula."""
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from cost import received

    x = torch.rand(2, LENGTHS[RANK], 3, requires_grad=True)
    with received_bytes() as found:
        y, _ = scan(ops.linear_scan, x, torch.rand_like(x))
        y.sum().backward()
    assert found == [received(RANK, SIZE, state=2 * 3 * 4, carry=2 * 3 * 4, backward=True)], found


def refused():
    """Ranks that do not fit each other: one error on all of them."""
    width = 3 if RANK == SIZE - 1 else 4
    for op, expected in ((ops.linear_scan, "another operands"), (ops.elman if RANK else ops.linear_scan, "another op")):
        x = torch.zeros(2, 3, width, dtype=torch.float64 if width == 3 else torch.float32)
        with pytest.raises(ConfigError, match=expected):
            scan(op, x, x if op is ops.linear_scan else torch.zeros(width, width, dtype=x.dtype))


def sharded():
    """A model whose weights are divided among the ranks learns as one that each has. One rank alone, and two ranks, go
    on from its checkpoint."""
    from scanl.learning.run.checkpoint import OWN_PARTS, PARTS
    from scanl.learning.run.shards import read_shards, write_shards
    from scanl.learning.run.sharing import shard, undivided_tensor

    torch.manual_seed(2)
    stack = Stack(8, 3, ("rwkv7", "mingru"), layer_options={"rwkv7": {"head_dim": 4}})
    model = LanguageModel(16, stack).double()
    divided, alone, by_two = (copy.deepcopy(model) for _ in range(3))
    tokens, targets = torch.randint(16, (2, 2 * SIZE, 7))
    mesh, two = DeviceMesh("cpu", list(range(SIZE))), DeviceMesh("cpu", [0, 1])

    def learn(model, optimizer, steps, rank=0, size=1):
        rows = slice(2 * SIZE // size * rank, 2 * SIZE // size * (rank + 1))
        for _ in range(steps):
            logits, _ = model(tokens[rows])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    def compare(found):
        for name, value in found.state_dict().items():
            close(undivided_tensor(value), model.state_dict()[name], name)

    optimizer, whole = (torch.optim.AdamW(each.parameters()) for each in (shard(divided, mesh), model))
    learn(divided, optimizer, 2, RANK, SIZE)
    learn(model, whole, 2)
    compare(divided)
    path, states = Path(sys.argv[3]).with_name("checkpoint.ckpt"), [optimizer.state_dict()]
    other, own = ({name: kinds[0]() for name, kinds in parts.items()} for parts in (PARTS, OWN_PARTS))
    own |= {"plan": {"steps": 1}, "place": {"batch": 0, "step": 0}}
    other |= {"metrics": {"size": 0, "sha256": ""}, "scanl": own}
    write_shards({**other, "state_dict": divided.state_dict(), "optimizer_states": states}, path)
    learn(model, whole, 1)
    for each, axis in ((alone, None), (by_two, two)) if RANK < 2 else ((alone, None),):
        found = read_shards(path, axis)
        optimizer = torch.optim.AdamW((each if axis is None else shard(each, axis)).parameters())
        each.load_state_dict(found["state_dict"])
        optimizer.load_state_dict(found["optimizer_states"][0])
        learn(each, optimizer, 1, *((0, 1) if axis is None else (RANK, 2)))
        compare(each)


def another_version():
    with pytest.MonkeyPatch.context() as patched:
        if RANK == SIZE - 1:
            patched.setattr(context, "version", lambda name: "0.0.0")
        with pytest.raises(ConfigError, match=f"rank {SIZE - 1} has another version of scanl than rank 0"):
            scan(ops.linear_scan, torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))


def another_mesh():
    """A rank that takes another group than the others names those that do not come; the others go on."""
    x, others = torch.zeros(1, 2, 3), list(range(SIZE - 1))
    every, fewer = dist.new_group([*others, SIZE - 1]), dist.new_group(others)
    if RANK in others:
        scan(ops.linear_scan, x, x, group=fewer)
        return
    named = f"rank {' or '.join(map(str, others))} has not come within 1 seconds, expected all {SIZE} ranks"
    with pytest.raises(ProcessError, match=named):
        scan(ops.linear_scan, x, x, group=every, timeout=timedelta(seconds=1))


def lost():
    """Ranks that do not come, that end, and that end in an exchange: the others raise an error soon, and name them."""
    x, last, store = torch.zeros(1, 2, 3), SIZE - 1, dist.group.WORLD.get_group_store()
    two, late = dist.new_group([0, 1]), dist.new_group(list(range(SIZE)))
    if last == RANK:
        store.wait([f"rank {rank} knows" for rank in range(last)], timedelta(minutes=2))
        os._exit(0)
    with pytest.raises(ProcessError, match=rf"rank {last} has not come within 1 seconds, expected all {SIZE} ranks"):
        scan(ops.linear_scan, x, x, group=late, timeout=timedelta(seconds=1))
    store.set(f"rank {RANK} knows", "")
    with pytest.raises(ProcessError, match=rf"rank {last} has ended, or lost its connection"):
        scan(ops.linear_scan, x, x)
    if RANK == 0:
        RankGroup.exchange = lambda *_: os._exit(0)
    if RANK < 2 < SIZE:
        with pytest.raises(ProcessError, match="rank 1 has lost rank 0 in an exchange"):
            scan(ops.linear_scan, x, x, group=two)
    os._exit(0)


if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"file://{sys.argv[3]}", timeout=timedelta(seconds=30), rank=RANK, world_size=SIZE)
    for what in sys.argv[4:]:
        works = every_op, reverse, hybrid, counted, refused, sharded, another_version, another_mesh, lost
        {work.__name__: work for work in works}[what]()
    dist.destroy_process_group()

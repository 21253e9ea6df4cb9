"""What each op is timed on and beside: operands, shapes, and the same functions of other libraries.

speed/ops.py and speed/gpu.py time them.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1]))
from harness import Contender, in_torch

Shape = tuple[int, ...]
Operands = tuple[Tensor | None, ...]  # of the op, by position, and last the gradient of its output


class Peer(NamedTuple):
    make: Callable[..., Contender]  # of the operands
    devices: tuple[str, ...] = ("cuda",)
    same: bool = True  # it computes what the op does


class Floor(NamedTuple):
    """Moves as many bytes as must be read and written forwards; and how many, forwards and with the backward pass."""

    call: Callable[[], object]
    forward: int
    both: int


def moved(*operands: Tensor | None) -> tuple[int, int]:
    """The operands and y, which is as large as dy; for the backward pass dy, the operands again, their gradients."""
    *leaves, y = (0 if value is None else value.nbytes for value in operands)
    return sum(leaves) + y, 3 * sum(leaves) + 2 * y


def copy(*operands: Tensor | None) -> Floor:
    """a copy"""
    assert operands[-1] is not None
    sizes = moved(*operands)
    source, target = torch.zeros(2, sizes[0] // 2, dtype=torch.uint8, device=operands[-1].device)
    return Floor(lambda: target.copy_(source), *sizes)


def copy_with_state(*operands: Tensor | None) -> Floor:
    """a copy; the state, last of the operands, is written too"""
    return copy(*operands[:-1], *operands[-2:])


class Benchmark(NamedTuple):
    """An op with operands of some kind. sweep: a shape for a number of steps. lengths: powers of two of the sweep."""

    op: str
    operands: Callable[["Draw", Shape], Operands]
    sweep: Callable[[int], Shape]
    shapes: tuple[Shape, ...]
    peers: dict[str, Peer]
    lengths: tuple[int, int] = (10, 16)
    floor: Callable[..., Floor] = copy
    options: Mapping[str, Any] = {}
    backward: bool = True


def contender(scan: Callable[..., Tensor], *operands: Tensor | None) -> Contender:
    """Return both passes of a function of the operands but the last, the gradient of its output."""
    return in_torch(scan, operands[:-1], operands[-1])


class Draw:
    """Numbers of operands, the same each time; bfloat16 on a GPU."""

    def __init__(self, device: str):
        self.generator = torch.Generator(device).manual_seed(0)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def decay(self, *shape: int) -> Tensor:
        return F.logsigmoid(self(*shape) + 4)

    def unit(self, *shape: int) -> Tensor:
        return F.normalize(self(*shape), dim=-1)

    def half(self, *operands: Tensor | None) -> Operands:
        return tuple(None if value is None else value.to(self.dtype) for value in operands)


def theirs(where: str, names: str, **more: Any) -> Callable[..., Contender]:
    """`package.module.function` of our operands, in our order under its names for them; `none` where ours is None."""
    module, _, function = where.rpartition(".")

    def make(*operands: Tensor | None) -> Contender:
        run = getattr(importlib.import_module(module), function)

        def scan(*leaves: Tensor | None) -> Tensor:
            given = {name: leaf for name, leaf in zip(names.split(), leaves, strict=True) if leaf is not None}
            y = run(**given, **more)
            return y[0] if isinstance(y, tuple) else y

        return contender(scan, *operands)

    return make


def scan_operands(draw: Draw, shape: Shape) -> Operands:
    return draw(*shape), 0.9 + 0.1 * draw(*shape).sigmoid(), draw(*shape)


def add(x: Tensor, a: Tensor, dy: Tensor) -> Floor:
    """torch.add(x, a, out=y)"""
    y = torch.empty_like(x)
    return Floor(lambda: torch.add(x, a, out=y), *moved(x, a, dy))


def torch_associative(x: Tensor, a: Tensor, dy: Tensor) -> Contender:
    from torch._higher_order_ops.associative_scan import associative_scan

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    mode = "pointwise" if x.is_cuda else "generic"
    torch.compiler.reset()
    return contender(torch.compile(lambda x, a: associative_scan(join, (a, x), dim=1, combine_mode=mode)[1]), x, a, dy)


def in_jax(how: str) -> Callable[..., Contender]:
    def make(x: Tensor, a: Tensor, dy: Tensor) -> Contender:
        import jax

        def associative(x, a):
            return jax.lax.associative_scan(lambda f, g: (f[0] * g[0], g[0] * f[1] + g[1]), (a, x), axis=1)[1]

        def loop(x, a):
            def step(h, now):
                h = now[1] * h + now[0]
                return h, h

            steps = x.swapaxes(0, 1), a.swapaxes(0, 1)
            return jax.lax.scan(step, jax.numpy.zeros_like(x[:, 0]), steps)[1].swapaxes(0, 1)

        scan = {"associative": associative, "loop": loop}[how]
        # numpy has no bfloat16
        kind = str(x.dtype).removeprefix("torch.")
        arrays = [jax.numpy.asarray(value.float().numpy()).astype(kind) for value in (x, a, dy)]

        def gradients(x, a, dy):
            y, back = jax.vjp(scan, x, a)
            return y, back(dy)

        forward, both = jax.jit(scan), jax.jit(gradients)
        return Contender(
            lambda: jax.block_until_ready(forward(*arrays[:2])), lambda: jax.block_until_ready(both(*arrays))[0]
        )

    return make


def hgrn(x: Tensor, a: Tensor, dy: Tensor) -> Contender:
    """Its decay is a logarithm, and so is its gradient."""
    return theirs("fla.ops.hgrn.chunk_hgrn", "x g")(x, a.log(), dy)


def turned(scan: Callable[..., Tensor], *operands: Tensor) -> Contender:
    """For time as the last axis in memory: operands that have it are turned before."""
    made = contender(scan, *(value.mT.contiguous() if value.ndim == 3 else value for value in operands))
    return Contender(*(lambda call=call: call().mT for call in made))


def accelerated_scan(x: Tensor, a: Tensor, dy: Tensor) -> Contender:
    from accelerated_scan.warp import scan

    return turned(lambda x, a: scan(a, x), x, a, dy)


def memory(decays: str, kind: str = "") -> Callable[[Draw, Shape], Operands]:
    """Shape B, T, H, K, values as wide; decays: the axes of g, `H`, `BTH` or `BTHK`, none when empty, in float32."""

    def operands(draw: Draw, shape: Shape) -> Operands:
        sizes = dict(zip("BTHK", shape, strict=True))
        q, k, v, dy = draw(*shape), draw.unit(*shape), draw(*shape), draw(*shape)
        g = draw.decay(*(sizes[axis] for axis in decays)) if decays else None
        beta = draw(*shape[:3]).sigmoid()
        q, k, v, beta, a, u, dy = draw.half(q, k, v, beta, -k * beta.unsqueeze(-1), draw(*shape[2:]), dy)
        more = {"": (g,), "bonus": (g, None, u), "delta": (beta, g), "low rank": (a, k, g)}
        return q, k, v, *more[kind], dy

    return operands


def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> Contender:
    """FlashAttention of the same q, k, v."""

    def scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return contender(scan, q, k, v, rest[-1])


def grouped(draw: Draw, shape: Shape) -> Operands:
    """Mamba-2: C, B of one group for all heads, x Δ, and Δ A; shape B, T, H, K, V."""
    B, T, H, K, V = shape
    dt = F.softplus(draw(B, T, H) - 3)
    q, k, v = draw.half(draw(B, T, 1, K), draw(B, T, 1, K), draw(B, T, H, V) * dt.unsqueeze(-1))
    return q, k, v, -dt, draw(B, T, H, V).to(draw.dtype)


def mamba2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, dy: Tensor) -> Contender:
    """With A = -1 its Δ is -g, and its x is v / Δ."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as scan

    A, scale = -torch.ones(v.shape[2], device=v.device), q.shape[-1] ** -0.5
    x = (v / -g.unsqueeze(-1)).to(v.dtype)
    return contender(lambda C, B, x, dt: scan(x, dt, A, B, C, 256), q * scale, k, x, -g, dy)


def simple_gla_grouped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, dy: Tensor) -> Contender:
    """Each head reads q and k of its own: they are repeated before."""
    q, k = (x.expand(-1, -1, v.shape[2], -1).contiguous() for x in (q, k))
    return theirs("fla.ops.simple_gla.chunk_simple_gla", "q k v g")(q, k, v, g, dy)


def selective(draw: Draw, shape: Shape) -> Operands:
    """u, Δ, A, B, C, D, z, bias of Δ; A, D and the bias in float32, as layers have them; shape B, T, E, N."""
    batch, T, E, N = shape
    A = -torch.arange(1.0, N + 1, device=draw.generator.device).repeat(E, 1)
    u, delta, z, dy = (draw(batch, T, E) for _ in range(4))
    u, delta, B, C, z, dy = draw.half(u, delta, draw(batch, T, N), draw(batch, T, N), z, dy)
    return u, delta, A, B, C, draw(E), z, draw(E) - 4, dy


def mamba(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *rest: Tensor) -> Contender:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn as scan

    z, bias, dy = rest
    return turned(lambda *leaves: scan(*leaves, delta_softplus=True), u, delta, A, B, C, D, z, bias, dy)


def average(draw: Draw, shape: Shape) -> Operands:
    """k, v, decay, bonus, the last two in float32; shape B, T, D."""
    k, v, dy = draw.half(draw(*shape), draw(*shape), draw(*shape))
    return k, v, -draw(shape[2]).exp(), draw(shape[2]), dy


def rwkv4(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, dy: Tensor) -> Contender:
    """Its decay is the logarithm of ours negated, its state is given."""
    from fla.ops.rwkv4 import fused_recurrent_rwkv4 as scan

    state = torch.zeros(len(k), 3, 1, k.shape[2], device=k.device)
    state[:, 2] = -1e38
    return contender(lambda k, v, w, u: scan(w, u, k, v, state)[0], k, v, (-decay).log(), bonus, dy)


def window(draw: Draw, shape: Shape) -> Operands:
    """x, w, bias; shape B, T, D, W."""
    B, T, D, W = shape
    return draw.half(draw(B, T, D), draw(D, W), draw(D), draw(B, T, D))


def causal_conv1d(x: Tensor, w: Tensor, bias: Tensor, dy: Tensor) -> Contender:
    """It takes (B, D, T), which may lie in memory as ours does."""
    from causal_conv1d import causal_conv1d_fn

    return contender(lambda x, w, bias: causal_conv1d_fn(x.mT, w, bias, activation="silu").mT, x, w, bias, dy)


def step(decays: str, kind: str = "") -> Callable[[Draw, Shape], Operands]:
    """One step from a state: what decoding costs a layer; shape B, 1, H, K."""

    def operands(draw: Draw, shape: Shape) -> Operands:
        *inputs, dy = memory(decays, kind)(draw, shape)
        return *inputs, *((None, None) if kind == "" else ()), draw(shape[0], *shape[2:], shape[3]), dy

    return operands


def steps(name: str, names: str) -> Peer:
    """fla's form for few steps."""
    return Peer(theirs(f"fla.ops.{name}", names, output_final_state=True))


def fla(name: str, names: str, **more: Any) -> dict[str, Peer]:
    """fla's chunked form, and FlashAttention of the same size."""
    flash = Peer(attention, ("cpu", "cuda"), same=False)
    return {f"fla {name.rpartition('.')[2]}": Peer(theirs(f"fla.ops.{name}", names, **more)), "attention": flash}


LARGE = ((8, 2048, 16, 128), (8, 4096, 16, 64), (8, 4096, 16, 128), (4, 4096, 32, 128), (1, 65536, 16, 128))
memories = partial(Benchmark, sweep=lambda steps: (1, steps, 16, 128), shapes=LARGE)
channels = partial(Benchmark, sweep=lambda steps: (1, steps, 2048))
BENCHMARKS = {
    "linear_scan": Benchmark(
        op="linear_scan",
        operands=scan_operands,
        floor=add,
        sweep=lambda steps: (1, steps, 16),
        lengths=(10, 20),
        shapes=((8, 1024, 1024), (1, 16384, 1024), (8, 4096, 256), (1, 2**20, 16)),
        peers={
            "torch associative_scan": Peer(torch_associative, ("cpu", "cuda")),
            "jax associative_scan": Peer(in_jax("associative"), ("cpu",)),
            "jax scan": Peer(in_jax("loop"), ("cpu",)),
            "fla chunk_hgrn": Peer(hgrn),
            "accelerated_scan": Peer(accelerated_scan),
        },
    ),
    "linear_attention": memories(
        "linear_attention", memory(""), peers=fla("linear_attn.chunk_linear_attn", "q k v none", normalize=False)
    ),
    "linear_attention-head": memories(
        "linear_attention", memory("H"), peers=fla("simple_gla.chunk_simple_gla", "q k v g_gamma")
    ),
    "linear_attention-step": memories(
        "linear_attention", memory("BTH"), peers=fla("simple_gla.chunk_simple_gla", "q k v g")
    ),
    "linear_attention-channel": memories("linear_attention", memory("BTHK"), peers=fla("gla.chunk_gla", "q k v g")),
    "linear_attention-bonus": memories(
        "linear_attention", memory("BTHK", "bonus"), peers=fla("rwkv6.chunk_rwkv6", "r k v w none u")
    ),
    "linear_attention-mamba2": Benchmark(
        op="linear_attention",
        operands=grouped,
        sweep=lambda steps: (1, steps, 32, 128, 64),
        shapes=((8, 2048, 32, 128, 64), (8, 4096, 32, 128, 64), (1, 65536, 32, 128, 64)),
        peers={"mamba_ssm": Peer(mamba2), "fla chunk_simple_gla": Peer(simple_gla_grouped)},
    ),
    "delta_rule": memories(
        "delta_rule", memory("", "delta"), peers=fla("delta_rule.chunk_delta_rule", "q k v beta none")
    ),
    "delta_rule-step": memories(
        "delta_rule", memory("BTH", "delta"), peers=fla("gated_delta_rule.chunk_gated_delta_rule", "q k v beta g")
    ),
    "delta_rule-channel": memories("delta_rule", memory("BTHK", "delta"), peers=fla("kda.chunk_kda", "q k v beta g")),
    "dplr_scan": memories(
        "dplr_scan",
        memory("BTHK", "low rank"),
        peers=fla("generalized_delta_rule.chunk_dplr_delta_rule", "q k v b a gk"),
    ),
    "selective_scan": Benchmark(
        op="selective_scan",
        operands=selective,
        sweep=lambda steps: (1, steps, 2048, 16),
        shapes=((8, 2048, 2048, 16), (8, 4096, 4096, 16), (1, 65536, 2048, 16)),
        peers={"mamba_ssm": Peer(mamba)},
        options={"delta_softplus": True},
    ),
    "weighted_average": channels(
        "weighted_average",
        average,
        shapes=((8, 2048, 2048), (8, 4096, 4096), (1, 65536, 2048)),
        peers={"fla fused_recurrent_rwkv4": Peer(rwkv4)},
    ),
    "short_convolution": Benchmark(
        op="short_convolution",
        operands=window,
        sweep=lambda steps: (1, steps, 2048, 4),
        shapes=((8, 2048, 2048, 4), (8, 4096, 4096, 4), (1, 65536, 2048, 4)),
        peers={
            "causal_conv1d": Peer(causal_conv1d),
            "fla causal_conv1d": Peer(
                theirs("fla.modules.causal_conv1d.causal_conv1d", "x weight bias", activation="silu")
            ),
        },
        options={"silu": True},
    ),
    "linear_attention-decode": Benchmark(
        op="linear_attention",
        operands=step("BTHK"),
        sweep=lambda batch: (batch, 1, 16, 128),
        lengths=(0, 8),
        shapes=((1, 1, 16, 128), (64, 1, 16, 128)),
        peers={"fla": steps("gla.fused_recurrent_gla", "q k v gk none none initial_state")},
        floor=copy_with_state,
        backward=False,
    ),
    "delta_rule-decode": Benchmark(
        op="delta_rule",
        operands=step("BTH", "delta"),
        sweep=lambda batch: (batch, 1, 16, 128),
        lengths=(0, 8),
        shapes=((1, 1, 16, 128), (64, 1, 16, 128)),
        peers={"fla": steps("gated_delta_rule.fused_recurrent_gated_delta_rule", "q k v beta g initial_state")},
        floor=copy_with_state,
        backward=False,
    ),
}

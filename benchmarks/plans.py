r"""What one step of training costs on many GPUs, by the form in which they share it.

One sequence of T tokens is read by G GPUs, forward and backward. Every form keeps the inputs of the blocks alone, in
half precision, and computes the rest of a block again in the backward pass, a piece of the stretch at a time. So the
matrix products of a model of P parameters take :math:`8 P T` operations: 2 forward, 2 again, and 4 backward.

The products run at the full speed that the GPU reaches for large ones. Messages that do not overlap with work are
counted in full. So these are the least times, and the share of messages in them is the largest.
"""

import math
from dataclasses import dataclass

from cost import Link, forward_seconds, gathered_seconds, received
from scanl.errors import ConfigError

HALF_BYTES = 2  # bytes of a number in half precision
TRAINED = 16  # bytes of a parameter: itself and its gradient in half precision, a copy and two moments in float32
EXCHANGES = ("rounds", "all-gather")


@dataclass(frozen=True)
class Model:
    """A recurrent language model, as far as it costs.

    parameters: P.   depth: L, layers.   width: D.   heads: of a layer.   state, carry: bytes of b and of A of a layer's
    op.   op_forward, op_backward: seconds in which one GPU runs the op of one layer over one token, each way.
    """

    parameters: float
    depth: int
    width: int
    heads: int
    state: float
    carry: float
    op_forward: float
    op_backward: float


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes, which a network connects.

    flops, attention: operations a second, of a matrix product and of causal softmax attention.   copy: bytes a second
    that a GPU copies.   memory: bytes of a GPU.   node: GPUs of a node.   near, far: the link of a GPU inside of its
    node, and to other nodes.
    """

    flops: float
    attention: float
    copy: float
    memory: float
    node: int
    near: Link
    far: Link

    def link(self, gpus: int) -> Link:
        """Return the slowest link between two of these GPUs, which are numbered by node."""
        return self.near if gpus <= self.node else self.far

    def collective(self, gpus: int) -> Link:
        """Return the link of a collective of all GPUs: between nodes it uses the links of all GPUs of a node."""
        bandwidth = (
            self.near.bandwidth if gpus <= self.node else min(self.near.bandwidth, self.node * self.far.bandwidth)
        )
        return Link(self.link(gpus).latency, bandwidth)


@dataclass(frozen=True)
class Step:
    """The cost of a step for the GPU that takes longest.

    products, ops: seconds of matrix products, and of the layers' ops or of attention.   waiting: seconds in which the
    GPU does neither.   received: bytes that it receives.   memory: bytes that it holds.
    """

    products: float
    ops: float
    waiting: float
    received: float
    memory: float

    @property
    def seconds(self) -> float:
        return self.products + self.ops + self.waiting


def alone(model: Model, machine: Machine, tokens: float) -> Step:
    r"""Return the cost on one GPU, whether or not its memory holds it: :math:`8 P T / flops + L T (2 f + b)`.

    f, b: `op_forward` and `op_backward`.
    """
    products = 8 * model.parameters * tokens / machine.flops
    ops = model.depth * tokens * (2 * model.op_forward + model.op_backward)
    return Step(products, ops, 0.0, 0.0, _memory(model, tokens, 1))


def sequence(model: Model, machine: Machine, gpus: int, tokens: float, *, exchange: str = "rounds") -> Step:
    r"""Return the cost where each GPU reads a stretch of T / G tokens: `ContextParallel`, with FSDP over the same GPUs.

    Each of the three passes of a layer exchanges summaries, as `forward_seconds` says or, for exchange="all-gather",
    `gathered_seconds`. The op runs three times forward in place of once, and twice backward:

    .. math:: 8 P T / (G\, flops) + L T / G\, (6 f + 2 b) + 3 L\, exchange

    FSDP gathers the parameters for two passes and scatters the gradients of one, 6 P bytes, while the GPU computes; the
    GPU waits for what takes longer than that.
    """
    if exchange not in EXCHANGES:
        raise ConfigError(f"exchange: it is {exchange!r}, expected one of {', '.join(EXCHANGES)}")
    share = alone(model, machine, tokens / gpus)
    ops = model.depth * tokens / gpus * (6 * model.op_forward + 2 * model.op_backward)
    pair = model.state + model.carry
    sizes = {"state": model.state, "carry": model.carry, "join": 3 * pair / machine.copy}  # two pairs in, one out
    if exchange == "rounds":
        seconds = forward_seconds(gpus, machine.link(gpus), **sizes)
        bytes_ = received(gpus - 1, gpus, state=int(model.state), carry=int(model.carry))
    else:
        seconds = gathered_seconds(gpus, machine.collective(gpus), **sizes)
        bytes_ = (gpus - 1) * pair
    weights, late = _sharded(model, machine, gpus, share.products + ops)
    waiting = 3 * model.depth * seconds + late
    return Step(share.products, ops, waiting, 3 * model.depth * bytes_ + weights, _memory(model, tokens, gpus))


def _sharded(model: Model, machine: Machine, gpus: int, busy: float) -> tuple[float, float]:
    """Return the bytes of FSDP, three times the parameters, and the seconds by which they take longer than `busy`."""
    weights, link = 3 * HALF_BYTES * model.parameters * (gpus - 1) / gpus, machine.collective(gpus)
    seconds = weights / link.bandwidth + 3 * model.depth * math.ceil(math.log2(gpus)) * link.latency
    return weights, max(0.0, seconds - busy)


def pipeline(model: Model, machine: Machine, gpus: int, tokens: float, *, chunk: int = 8192) -> Step | None:
    r"""Return the cost where each GPU has some layers, and the sequence goes through them in m chunks of time.

    A stage reads a chunk after the stage before has, from the state that it had itself after the last chunk. So a
    recurrence fills a pipeline with one sequence:

    .. math:: (m + G - 1)\, \lceil L / G \rceil / L\, \cdot alone(chunk), \quad m = T / chunk

    Messages, of D numbers a token, overlap with work unless they take longer. None for more GPUs than layers.

    chunk: tokens. Fewer fill the pipeline sooner, until a GPU has too little to do at once.
    """
    if gpus > model.depth:
        return None
    chunks, layers = max(1.0, tokens / chunk), math.ceil(model.depth / gpus)
    fraction = layers / model.depth
    one = alone(model, machine, min(chunk, tokens) * fraction)
    message = HALF_BYTES * model.width * min(chunk, tokens)
    slot = max(one.seconds, 2 * machine.link(gpus).message(message))
    waiting = (chunks + gpus - 1) * slot - chunks * one.seconds
    memory = TRAINED * model.parameters * fraction + HALF_BYTES * model.width * layers * tokens
    return Step(chunks * one.products, chunks * one.ops, waiting, 2 * chunks * message, memory)


def tensor(model: Model, machine: Machine, gpus: int, tokens: float) -> Step | None:
    r"""Return the cost where each GPU has some heads and channels of every layer (Megatron's form).

    The two halves of a block, in each of three passes, gather and scatter D numbers a token, for which all wait:

    .. math:: alone(T) / G + 12 L\, (\lceil\log_2 G\rceil\, latency + 2 D T (G - 1) / (G\, bandwidth))

    None for more GPUs than heads.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198,
    sec. 4.
    """
    if gpus > model.heads:
        return None
    share, link = alone(model, machine, tokens / gpus), machine.collective(gpus)
    once = HALF_BYTES * model.width * tokens * (gpus - 1) / gpus
    waiting = 12 * model.depth * (math.ceil(math.log2(gpus)) * link.latency + once / link.bandwidth)
    return Step(share.products, share.ops, waiting, 12 * model.depth * once, _memory(model, tokens, gpus))


def ring_attention(model: Model, machine: Machine, gpus: int, tokens: float) -> Step:
    r"""Return the cost of a softmax transformer of the same sizes, whose keys and values go round a ring of stretches.

    A layer has :math:`2 D T^2` operations forward, as many again, and 5/2 times as many backward. In each of G - 1
    rounds the GPU receives D keys and values of T / G tokens, and their gradients in the backward pass; a round takes
    as long as the longer of both. Stretches are dealt so that all GPUs have as much to do.

    Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, sec. 3.
    """
    share, link = alone(model, machine, tokens / gpus), machine.link(gpus)
    attention = _attention(model, machine, gpus, tokens)
    block = 2 * HALF_BYTES * model.width * tokens / gpus
    rounds_ = model.depth * (gpus - 1)
    weights, late = _sharded(model, machine, gpus, share.products + attention)
    waiting = late + rounds_ * max(0.0, 4 * link.message(block) - attention / (model.depth * gpus))
    return Step(share.products, attention, waiting, 4 * rounds_ * block + weights, _memory(model, tokens, gpus))


def ulysses(model: Model, machine: Machine, gpus: int, tokens: float) -> Step | None:
    r"""Return the cost of a softmax transformer of the same sizes, whose GPUs swap stretches for heads and back.

    In each of three passes a layer sends q, k, v and y of T / G tokens to all others, :math:`8 D T (G - 1) / G^2`
    bytes. None for more GPUs than heads.

    Source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, sec. 3.
    """
    if gpus > model.heads:
        return None
    share, link = alone(model, machine, tokens / gpus), machine.link(gpus)
    swapped = 4 * HALF_BYTES * model.width * tokens / gpus * (gpus - 1) / gpus
    attention = _attention(model, machine, gpus, tokens)
    weights, late = _sharded(model, machine, gpus, share.products + attention)
    waiting = late + 3 * model.depth * (4 * link.latency + swapped / link.bandwidth)
    bytes_ = 3 * model.depth * swapped + weights
    return Step(share.products, attention, waiting, bytes_, _memory(model, tokens, gpus))


def _attention(model: Model, machine: Machine, gpus: int, tokens: float) -> float:
    return 4.5 * 2 * model.width * model.depth * tokens**2 / gpus / machine.attention


def _memory(model: Model, tokens: float, gpus: int) -> float:
    """Return bytes of a GPU: parameters as the optimizer has them, and the inputs of all blocks."""
    return (TRAINED * model.parameters + HALF_BYTES * model.width * model.depth * tokens) / gpus

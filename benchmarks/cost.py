"""What dividing a sequence costs: bytes and time of the exchanges of one op."""

import math
from dataclasses import dataclass

from scanl.parallel.exchanges import rounds


def received(rank: int, size: int, *, state: int, carry: int, backward: bool = False) -> int:
    """Return the bytes that a rank receives for one call of an op that is linear in its state.

    Forward, a rank behind rank 0 receives the pair (A, b) of its neighbour, and one pair for each distance d = 1, 2, 4,
    ... < R - 1 at which there is a rank 1 or higher. Backward, each but the last receives as many from the other side,
    without A in the exchange with the neighbour. With two ranks A is not sent at all.

    rank, size: r of R.   state, carry: bytes of b, which is a state, and of A.   backward: count both passes.
    """
    distances = rounds(size)
    pair = state + carry
    forward = (state + (carry if distances else 0)) * (rank > 0) + sum(pair for d in distances if rank > d)
    if not backward:
        return forward
    after = state * (rank < size - 1) + sum(pair for d in distances if rank > 0 and rank + d < size)
    return forward + after


@dataclass(frozen=True)
class Link:
    r"""A connection of ranks. While m ranks send, a message of n bytes takes

    .. math:: t_m(n) = latency + \max(1, m / lanes)\, n / bandwidth.

    latency: seconds.   bandwidth: bytes a second of a message that is alone.   lanes: messages that pass at full speed
    side by side. GPUs have a link each, so that it is infinite; processes of one machine share its cores.
    """

    latency: float
    bandwidth: float
    lanes: float = math.inf

    def message(self, size: float, at_once: int = 1) -> float:
        """Return the seconds of a message of `size` bytes while `at_once` ranks send one."""
        return self.latency + max(1.0, at_once / self.lanes) * size / self.bandwidth


def forward_seconds(size: int, link: Link, *, state: float, carry: float, join: float = 0.0) -> float:
    r"""Return the seconds until all of `size` ranks know the state that enters their stretches.

    .. math:: t_{R-1}(b) + [R > 2]\, t_{R-1}(A) + \sum_{d = 1, 2, 4, ... < R-1} (t_{R-1-d}(b) + t_{R-1-d}(A) + join)

    Each exchange is a message of b and one of A, one after the other, of all ranks that have one to send.

    state, carry: bytes of b and of A.   join: seconds in which a rank joins two pairs.
    """
    if size == 1:
        return 0.0
    distances = rounds(size)
    first = link.message(state, size - 1) + (link.message(carry, size - 1) if distances else 0)
    return first + sum(link.message(state, size - 1 - d) + link.message(carry, size - 1 - d) + join for d in distances)


def gathered_seconds(size: int, link: Link, *, state: float, carry: float, join: float = 0.0) -> float:
    r"""Return the seconds of the other way to the same states: each rank gets all pairs, and joins them itself.

    .. math:: \lceil\log_2 R\rceil\, latency + (R - 1)\, ((b + A) / bandwidth + join)

    It has less latency and more bytes, so it is faster for few ranks. `scanl.parallel.scan` does not do this.
    """
    hops = math.ceil(math.log2(size)) if size > 1 else 0
    return hops * link.latency + (size - 1) * ((state + carry) / link.bandwidth + join)


def in_turn_seconds(size: int, link: Link, *, state: float, stretch: float) -> float:
    """Return the seconds of a layer whose state goes from rank to rank. stretch: the seconds of one stretch."""
    return size * stretch + (size - 1) * link.message(state)

"""What dividing a sequence costs: bytes and time of the exchanges."""

from dataclasses import dataclass

from scanl.parallel.division import rounds


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
    """A connection of two ranks. A message of n bytes takes latency + n / bandwidth.

    latency: seconds.   bandwidth: bytes a second.
    """

    latency: float
    bandwidth: float

    def message(self, size: float) -> float:
        """Return the seconds of a message of `size` bytes."""
        return self.latency + size / self.bandwidth


def forward_seconds(size: int, link: Link, *, state: float, carry: float) -> float:
    """Return the seconds until all of `size` ranks know the state that enters their stretches.

    Each exchange is a message of b and one of A, one after the other; all ranks exchange at the same time.
    """
    pair = link.message(state) + link.message(carry)
    distances = rounds(size)
    return link.message(state) + (link.message(carry) if distances else 0) + len(distances) * pair


def in_turn_seconds(size: int, link: Link, *, state: float, stretch: float) -> float:
    """Return the seconds of a layer whose state goes from rank to rank. stretch: the seconds of one stretch."""
    return size * stretch + (size - 1) * link.message(state)

"""A tree of token sequences: finds the longest beginning of a text that it holds."""

from array import array
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

Text: TypeAlias = "array[int]"  # of type code "i": 4 bytes for each token
V = TypeVar("V")


class PrefixNode(Generic[V]):
    """The end of a sequence. edge: the tokens after the parent.   value: None where no sequence ends."""

    __slots__ = ("children", "edge", "parent", "value")

    def __init__(self, edge: Text, parent: "PrefixNode[V] | None") -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, PrefixNode[V]] = {}  # by the first token of their edges
        self.value: V | None = None


class PrefixTree(Generic[V]):
    """Values by token sequence. Sequences with the same beginning share its tokens.

    Finding and inserting take time in proportion to the text's length, at the speed of comparing memory.
    """

    def __init__(self) -> None:
        self.root: PrefixNode[V] = PrefixNode(array("i"), None)

    def insert(self, tokens: Text) -> PrefixNode[V]:
        """Return the node at which the sequence ends; it is made if missing, without a value."""
        node, at = self.root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = node.children[tokens[at]] = PrefixNode(tokens[at:], node)
                return child
            common = common_length(child.edge, tokens[at : at + len(child.edge)])
            node, at = child if common == len(child.edge) else _split(child, common), at + common
        return node

    def beginnings(self, tokens: Text) -> Iterator[tuple[int, PrefixNode[V]]]:
        """Yield each node with a value whose sequence begins the text, and its length; the shortest first."""
        node, at = self.root, 0
        while True:
            if node.value is not None:
                yield at, node
            if at == len(tokens) or (child := node.children.get(tokens[at])) is None:
                return
            if child.edge != tokens[at : at + len(child.edge)]:
                return
            node, at = child, at + len(child.edge)

    def remove(self, node: PrefixNode[V]) -> None:
        """Remove the value of a node, and the nodes that are then needed no more."""
        node.value = None
        while node.parent is not None and node.value is None and not node.children:
            del node.parent.children[node.edge[0]]
            node = node.parent
        if node.parent is not None and node.value is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = node.edge + child.edge, node.parent
            node.parent.children[node.edge[0]] = child


def common_length(a: Text, b: Text) -> int:
    """Return the length of the common beginning of two sequences of tokens."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # halves are compared at the speed of memory, single tokens are not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _split(node: PrefixNode[V], length: int) -> PrefixNode[V]:
    """Return a new node between a node and its parent, after the first `length` tokens of the edge."""
    assert node.parent is not None
    upper = PrefixNode(node.edge[:length], node.parent)
    node.parent.children[node.edge[0]] = upper
    node.edge, node.parent = node.edge[length:], upper
    upper.children[node.edge[0]] = node
    return upper

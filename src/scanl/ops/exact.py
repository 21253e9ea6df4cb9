"""Results with the same bits for every cut, batch and packing of a sequence, and every number of threads."""

from scanl.ops._frame.context import context, prefer, preferred, unprefer
from scanl.ops.products.functions import REPLACED_FUNCTIONS


class exact:
    """A context in which a row of a batch has the same bits on a CPU, however its sequence was cut and batched.

    Forward passes alone: gradients are right, but their last bits may differ. Outside, most layers already differ in no
    more than the last bits. Contexts nest; each thread has its own. What is compiled or exported is as without.

    It does three things. Ops take the backends that go step by step. Kernels do not cut time into pieces. And torch's
    products of matrices (`F.linear`, `@`, `torch.einsum`, ...) multiply rows in blocks of fixed size: torch's functions
    are replaced while any context is open, and are torch's own in threads without one.

    portable: let the compiled step of a language model have the bits of every machine. Sums have one order, and
    no product is contracted with a sum, so it is slow unless the weights are whole numbers (`models.quantize`). A step
    that no kernel can run so raises BackendError.

    >>> import torch
    >>> from scanl import layers
    >>> layer, x = layers.build("hawk", 32), torch.randn(2, 9, 32)
    >>> with exact(), torch.no_grad():
    ...     y, state = layer(x)
    ...     first, state = layer.step(x[:, 0], None)
    >>> torch.equal(first, y[:, 0])
    True
    """

    def __init__(self, *, portable: bool = False) -> None:
        self._portable = portable

    def __enter__(self) -> None:
        names = [name for name in preferred() if name in ("cpu", "reference")]
        prefer(tuple(names) if "auto" not in preferred() and names else ("cpu", "reference"))
        context.exact += 1
        context.portable += self._portable
        for replacement in REPLACED_FUNCTIONS:
            replacement.open()

    def __exit__(self, *error: object) -> None:
        for replacement in REPLACED_FUNCTIONS:
            replacement.close()
        context.exact -= 1
        context.portable -= self._portable
        unprefer()

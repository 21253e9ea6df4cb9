"""Products of many pairs of matrices: any strides, rows beside whole tiles, expanded axes, gradients, and in layers."""

import itertools

import pytest
import torch

from scanl.ops.products import batched, functions


def assert_product(y, a, b):
    """Each term is rounded, and so is each sum. The sum over an axis is no product that a layer replaces."""
    pairs = a.double()[..., None, :] * b.double().mT[..., None, :, :]
    bound = (a.shape[-1] + 1) * torch.finfo(a.dtype).eps * pairs.abs().sum(-1)
    assert ((y - pairs.sum(-1)).abs() <= bound).all()


@pytest.mark.parametrize(("rows", "terms", "columns"), [(8, 16, 16), (13, 70, 48), (270, 5, 32), (32, 129, 7)])
def test_it_is_the_product_for_any_strides(rows, terms, columns):
    """Rows pass a block, terms a strip; empty memory is not read."""
    for turned in itertools.product((False, True), repeat=2):
        a, b = torch.randn(2, 3, terms, rows), torch.randn(2, 3, columns, terms)
        a = a.mT if turned[0] else a.mT.contiguous()
        b = b.mT if turned[1] else b.mT.contiguous()
        assert_product(batched.product(a, b), a, b)
        spread = a.transpose(0, 1).contiguous().transpose(0, 1)  # as heads beside time
        assert_product(batched.product(spread, b[:1]), spread, b[:1])
        assert_product(batched.product(a.double(), b.double()), a.double(), b.double())


def test_gradients_are_those_of_torch():
    a, b = torch.randn(2, 1, 21, 18, requires_grad=True), torch.randn(1, 3, 18, 32, requires_grad=True)

    def gradients(times, order):
        y = times(a, b).square()
        first = torch.autograd.grad(y.sum(), (a, b), create_graph=order == 2)
        return torch.autograd.grad(first[0].sin().sum() + first[1].sin().sum(), (a, b)) if order == 2 else first

    for order in (1, 2):
        torch.testing.assert_close(
            gradients(batched.product, order), gradients(torch.matmul, order), rtol=1e-4, atol=1e-3
        )


def test_products_of_all_spellings_take_it_inside_a_layer(monkeypatch):
    a, b = torch.randn(4, 2, 64, 128), torch.randn(4, 2, 128, 64)
    spellings = {
        "matmul": lambda: torch.matmul(a, b),
        "method": lambda: a.matmul(b),
        "operator": lambda: a @ b,
        "bmm": lambda: torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(4, 2, 64, 64),
        "einsum": lambda: torch.einsum("bhik,bhkj->bhij", a, b),
        "turned": lambda: torch.einsum("bhik,bhkj->bjhi", a, b).permute(0, 2, 3, 1),
    }
    original, taken = batched.product, []
    monkeypatch.setattr(batched, "product", lambda *operands: taken.append(1) or original(*operands))
    for count, (name, spelled) in enumerate(spellings.items()):
        assert_product(spelled(), a, b)
        assert len(taken) == count, name
        with functions.large_products(64):
            assert_product(spelled(), a, b)
            a[:1, :1, :8] @ b[:1, :1]
        assert len(taken) == count + 1, name

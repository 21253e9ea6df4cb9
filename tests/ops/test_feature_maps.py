"""Feature maps: inner products of features are the kernels that the maps state, exactly or in the mean."""

import math

import pytest
import torch

import scanl.ops
from scanl.errors import ConfigError, ShapeError
from scanl.layers import LinearAttention
from scanl.ops import feature_maps as maps
from scanl.ops.feature_maps import FEATURE_MAPS

RANDOM = {
    "positive": maps.positive_random_features,
    "trigonometric": maps.trigonometric_random_features,
    "fourier": maps.fourier_features,
    "arc_cosine": maps.arc_cosine_features,
}
every = pytest.mark.parametrize("name", FEATURE_MAPS)
every_random = pytest.mark.parametrize("name", RANDOM)


def kernel_elu(q, k):
    return sum((a + 1 if a > 0 else math.exp(a)) * (b + 1 if b > 0 else math.exp(b)) for a, b in zip(q, k, strict=True))


def kernel_dpfp(q, k, nu=1):
    def r(x, i):
        i %= 2 * len(x)
        return max(0.0, x[i] if i < len(x) else -x[i - len(x)])

    return sum(r(q, i) * r(q, i - s) * r(k, i) * r(k, i - s) for s in range(1, nu + 1) for i in range(2 * len(q)))


def dot(q, k):
    return sum(a * b for a, b in zip(q, k, strict=True))


KERNELS = {
    "identity": dot,
    "relu": lambda q, k: sum(max(a, 0) * max(b, 0) for a, b in zip(q, k, strict=True)),
    "squared_relu": lambda q, k: sum((max(a, 0) * max(b, 0)) ** 2 for a, b in zip(q, k, strict=True)),
    "elu_plus_one": kernel_elu,
    "dpfp": kernel_dpfp,
    "taylor": lambda q, k: 1 + dot(q, k) + dot(q, k) ** 2 / 2,
    "polynomial": lambda q, k: (1 + dot(q, k)) ** 2,
    "quadratic": lambda q, k: dot(q, k) ** 2,
}
SIZES = dict.fromkeys(("identity", "relu", "squared_relu", "elu_plus_one"), lambda K: K) | {
    "dpfp": lambda K: 2 * K,
    "taylor": lambda K: 1 + K + K * (K + 1) // 2,
    "polynomial": lambda K: 1 + K + K * (K + 1) // 2,
    "quadratic": lambda K: K * (K + 1) // 2,
}


def assert_kernel(q_features, k_features, q, k, kernel):
    found = q_features @ k_features.mT
    expected = torch.tensor([[kernel(a, b) for b in k.tolist()] for a in q.tolist()], dtype=q.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@every
@pytest.mark.parametrize("K", [1, 2, 5])
def test_inner_products_are_the_kernel(name, K):
    q, k = torch.randn(2, 7, K, dtype=torch.float64)
    phi = FEATURE_MAPS[name]
    assert phi(q).shape == (7, SIZES[name](K))
    assert_kernel(phi(q), phi(k), q, k, KERNELS[name])


def test_every_registered_map_is_tried():
    assert FEATURE_MAPS.keys() == KERNELS.keys() == SIZES.keys()
    assert all(function.__name__ == name for name, function in FEATURE_MAPS.items())


@pytest.mark.parametrize("nu", [1, 2, 5])
def test_dpfp_of_more_shifts(nu):
    q, k = torch.randn(2, 6, 3, dtype=torch.float64)
    assert maps.dpfp(q, nu).shape == (6, 6 * nu)
    assert_kernel(maps.dpfp(q, nu), maps.dpfp(k, nu), q, k, lambda a, b: kernel_dpfp(a, b, nu))
    assert (maps.dpfp(q, nu) >= 0).all()


def test_taylor_is_the_exponential_to_second_order():
    q, k = torch.randn(2, 50, 4, dtype=torch.float64) / 20
    product = (q * k).sum(-1)
    found = (maps.taylor(q) * maps.taylor(k)).sum(-1)
    assert ((found - product.exp()).abs() <= product.abs() ** 3 / 5).all()
    q = torch.randn(200, 3)
    assert (maps.taylor(q) @ maps.taylor(q).mT).min() > 0.49


def test_elu_plus_one_stays_positive():
    x = torch.tensor([-80.0, -20.0, -0.0, 0.0, 1e-3, 5.0], requires_grad=True)
    y = maps.elu_plus_one(x)
    torch.testing.assert_close(y.double(), torch.where(x > 0, x.double() + 1, x.double().exp()), rtol=1e-6, atol=0)
    assert (y > 0).all()
    grad = torch.autograd.grad(y.sum(), x)[0]
    torch.testing.assert_close(grad, torch.where(x > 0, 1, x.exp()).detach())


@pytest.mark.parametrize("shape", [(2, 6, 3, 4), (2, 6, 4), (6, 4)], ids=str)
@pytest.mark.parametrize("batched", [False, True])
def test_cosine_reweighting(shape, batched):
    """relu(q_i)·relu(k_j) cos(π(i - j)/2M) for every pair of steps, heads in between or not."""
    if batched and len(shape) == 2:
        return
    q, k = torch.randn(2, *shape, dtype=torch.float64)
    positions, horizon = torch.arange(6) + 3, 8
    given = torch.stack([positions, positions + 40]) if batched else positions
    f, g = maps.cosine_reweighting(q, given, horizon), maps.cosine_reweighting(k, given, horizon)
    assert f.shape == (*shape[:-1], 8)
    axis = min(1, len(shape) - 2)
    for i in range(6):
        for j in range(6):
            found = (f.select(axis, i) * g.select(axis, j)).sum(-1)
            expected = (q.select(axis, i).relu() * k.select(axis, j).relu()).sum(-1)
            torch.testing.assert_close(found, expected * math.cos(math.pi * (i - j) / 2 / horizon))


def test_cosine_reweighting_far_into_a_stream():
    """Only differences of positions count, after a million steps too; negative weights begin past the horizon."""
    x = torch.ones(1, 3, 1)
    for start in (0, 10**6, 10**6 + 7):
        f = maps.cosine_reweighting(x, torch.arange(3) + start, 4)[0]
        expected = [[math.cos(math.pi * (i - j) / 8) for j in range(3)] for i in range(3)]
        torch.testing.assert_close(f @ f.mT, torch.tensor(expected), rtol=1e-6, atol=1e-6)
    f = maps.cosine_reweighting(x, torch.tensor([0, 4, 6]), 4)[0]
    assert (f @ f.mT)[0].sign().tolist()[::2] == [1, -1]


EXPECTED = {
    "positive": lambda q, k: (q @ k).exp(),
    "trigonometric": lambda q, k: (q @ k).exp(),
    "fourier": lambda q, k: (-(q - k).square().sum() / 2).exp(),
    "arc_cosine": lambda q, k: arc_cosine_kernel(q, k),
}


def arc_cosine_kernel(q, k):
    angle = torch.arccos((q @ k / q.norm() / k.norm()).clamp(-1, 1))
    return q.norm() * k.norm() * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)


def estimates(name, q, k, draws, features, orthogonal, seed=0):
    """Return φ(q)·φ(k) of each projection, which stands for a head: (draws,), or (n, draws) of n keys."""
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "orthogonal": orthogonal, "dtype": torch.float64}
    w = torch.stack([maps.random_projection(features, len(q), **options) for _ in range(draws)])
    at_q, at_k = (RANDOM[name](x[..., None, :].expand(*x.shape[:-1], draws, -1), w) for x in (q, k))
    return (at_q * at_k).sum(-1)


@every_random
@pytest.mark.parametrize("orthogonal", [False, True], ids=["independent", "orthogonal"])
@pytest.mark.parametrize("features", [3, pytest.param(8, marks=pytest.mark.long)])
def test_random_maps_are_unbiased(name, orthogonal, features):
    """The mean over 1500 projections is the kernel within four standard errors, each at most a twentieth of it."""
    generator = torch.Generator().manual_seed(1)
    q, k = 0.6 * torch.randn(2, 4, dtype=torch.float64, generator=generator)
    others = torch.stack([k, -k, q])
    found = estimates(name, q, others, 1500, features, orthogonal)
    for other, of_other in zip(others, found, strict=True):
        expected, error = EXPECTED[name](q, other), of_other.std() / math.sqrt(len(of_other))
        assert error <= 0.05 * expected
        assert (of_other.mean() - expected).abs() <= 4 * error + 1e-12


@pytest.mark.parametrize("name", ["trigonometric", "fourier"])
def test_orthogonal_rows_vary_less(name):
    """By half, where the estimates are bounded; those of positive features have tails too heavy to measure it."""
    q = torch.tensor([0.21, -0.15, 0.09, 0.12], dtype=torch.float64)
    apart, together = (estimates(name, q, q.flip(0), 2000, 4, orthogonal).var() for orthogonal in (False, True))
    assert together < 0.6 * apart


def test_fourier_features_have_unit_length():
    x, w = torch.randn(5, 3, dtype=torch.float64), maps.random_projection(6, 3, dtype=torch.float64)
    torch.testing.assert_close(maps.fourier_features(x, w).norm(dim=-1), torch.ones(5, dtype=torch.float64))


def test_positive_features_stay_in_range():
    """Without a stabiliser: e^(w·x - ‖x‖²/2) is at most e^(‖w‖²/2), reached at x = w."""
    w = maps.random_projection(256, 128, generator=torch.Generator().manual_seed(0))
    x = torch.cat([w, 3 * w, 100 * w, -w])
    features = maps.positive_random_features(x, w)
    assert torch.isfinite(features).all()
    assert (features >= 0).all()


@every_random
def test_a_stream_has_the_features_of_the_whole(name):
    """One vector's features depend on no other: neither earlier, nor later, nor larger ones."""
    x, w = torch.randn(2, 9, 4), maps.random_projection(8, 4)
    x[:, 5] *= 3
    whole = RANDOM[name](x, w)
    for t in range(9):
        torch.testing.assert_close(RANDOM[name](x[:, t], w), whole[:, t], rtol=1e-4, atol=1e-6)


@every_random
def test_each_head_may_have_its_projection(name):
    x, w = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randn(3, 6, 4, dtype=torch.float64)
    found = RANDOM[name](x, w)
    for head in range(3):
        torch.testing.assert_close(found[:, :, head], RANDOM[name](x[:, :, head], w[head]))


def test_random_projection():
    generator = torch.Generator().manual_seed(3)
    w = maps.random_projection(11, 4, generator=generator, dtype=torch.float64)
    assert w.shape == (11, 4)
    for block in w.split(4):
        gram = block @ block.T
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-12)
    again = maps.random_projection(11, 4, generator=torch.Generator().manual_seed(3))
    assert again.dtype == torch.float32
    torch.testing.assert_close(again, w.float(), rtol=0, atol=0)
    free = maps.random_projection(8, 4, generator=generator, orthogonal=False)
    assert (free @ free.T - torch.diag((free @ free.T).diagonal())).abs().max() > 0.1


@pytest.mark.parametrize("orthogonal", [False, True])
def test_rows_of_a_projection_are_gaussian(orthogonal):
    """Moments of every entry, and of the squared length, as those of N(0, I); a sign left to QR would show in them."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "orthogonal": orthogonal, "dtype": torch.float64}
    draws = torch.stack([maps.random_projection(3, 3, **options) for _ in range(4000)])
    error = 1 / math.sqrt(len(draws))
    assert draws.mean(0).abs().max() < 4 * error
    assert (draws.square().mean(0) - 1).abs().max() < 4 * math.sqrt(2) * error
    assert (draws.pow(4).mean(0) - 3).abs().max() < 4 * math.sqrt(96) * error
    length = draws.square().sum(-1)
    assert (length.mean(0) - 3).abs().max() < 4 * math.sqrt(6) * error
    assert (length.var(0) - 6).abs().max() < 1.0


ALL = {
    **FEATURE_MAPS,
    "cosine_reweighting": lambda x: maps.cosine_reweighting(x, torch.arange(x.shape[1]), 10),
    **{name: lambda x, f=f: f(x, torch.linspace(-1, 1, 3 * x.shape[-1]).view(3, -1)) for name, f in RANDOM.items()},
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(name, dtype):
    x = torch.randn(2, 5, 4).to(dtype)
    y = ALL[name](x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, ALL[name](x.float()).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_every_order(name):
    x = torch.randn(2, 3, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(ALL[name], x)
    assert torch.autograd.gradgradcheck(ALL[name], x)


@pytest.mark.parametrize("name", ALL)
def test_any_leading_axes(name):
    x = torch.randn(2, 3, 2, 4)
    y = ALL[name](x)
    assert y.shape[:-1] == x.shape[:-1]
    strided = ALL[name](x.transpose(0, 2).contiguous().transpose(0, 2))
    torch.testing.assert_close(strided, y)
    assert ALL[name](x[:0]).shape == (0, *y.shape[1:])


@pytest.mark.parametrize("name", [name for name in ALL if name not in RANDOM])
def test_maps_run_where_their_tensors_live(name):
    assert ALL[name](torch.zeros(2, 3, 4, device="meta")).device.type == "meta"


@every_random
def test_random_maps_run_where_their_tensors_live(name):
    w = maps.random_projection(5, 4, device="meta")
    assert RANDOM[name](torch.zeros(2, 3, 4, device="meta"), w).shape[:-1] == (2, 3)


def _errors():
    x, w = torch.zeros(2, 5, 4), torch.zeros(3, 4)
    for name, function in FEATURE_MAPS.items():
        yield function, (x.long(),), f"{name}: x is int64, expected a tensor of a real floating dtype"
        yield function, (x.to(torch.complex64),), f"{name}: x is complex64, expected"
        yield function, (1.0,), f"{name}: x is a float, expected"
        yield function, (x[0, 0, 0],), f"{name}: x has shape (), expected (..., K)"
    yield maps.dpfp, (x, 0), "dpfp: nu is 0, expected an integer from 1 to 2K-1=7"
    yield maps.dpfp, (x, 8), "dpfp: nu is 8, expected"
    yield maps.dpfp, (x, 1.5), "dpfp: nu is 1.5, expected"
    cosine = "cosine_reweighting: "
    yield maps.cosine_reweighting, (x, torch.arange(4), 5), cosine + "positions has shape (4,), expected (5,) or (2, 5)"
    yield (
        maps.cosine_reweighting,
        (x[0], torch.arange(4), 5),
        cosine + "positions has shape (4,), expected (5,) because",
    )
    yield maps.cosine_reweighting, (x, 3, 5), cosine + "positions has type int, expected (5,) or (2, 5) because of x"
    yield maps.cosine_reweighting, (x, torch.arange(5), 0), cosine + "horizon is 0, expected a number > 0"
    yield maps.cosine_reweighting, (x[0, 0], torch.arange(5), 5), cosine + "x has shape (4,), expected (B, T, ..., K)"
    for function in RANDOM.values():
        who = function.__name__
        yield function, (x, w.T), f"{who}: projection has shape (4, 3), expected (m, K) with K=4 from x and m > 0"
        yield function, (x, w[:0]), f"{who}: projection has shape (0, 4), expected (m, K)"
        yield (
            function,
            (x, w.expand(2, 3, 4)),
            f"{who}: projection has shape (2, 3, 4), expected (H, m, K) with H and K of x's shape (2, 5, 4) and m > 0",
        )
        yield function, (x, w.long()), f"{who}: projection is int64, expected a tensor of a real floating dtype"
        yield function, (x, w.to("meta")), f"{who}: projection is on meta, expected cpu because of x"
        yield function, (x.long(), w), f"{who}: x is int64"
    yield maps.random_projection, (0, 4), "random_projection: features=0 and dim=4, expected at least 1 each"


def test_errors_name_the_argument():
    for function, arguments, message in _errors():
        with pytest.raises((ShapeError, ConfigError)) as caught:
            function(*arguments)
        assert str(caught.value).startswith(message)


def test_they_live_in_a_module_of_their_own():
    assert not set(maps.__all__) & set(dir(scanl.ops))
    assert all(hasattr(maps, name) for name in maps.__all__)
    assert all(hasattr(scanl.ops, name) for name in scanl.ops.__all__)


@pytest.mark.parametrize(("degree", "K"), [(1, 4), (3, 1), (3, 5), (4, 3), (6, 2)])
def test_a_polynomial_of_any_degree_is_its_kernel(degree, K):
    q, k = torch.randn(6, K, dtype=torch.float64), torch.randn(5, K, dtype=torch.float64)
    features = maps.polynomial(q, degree), maps.polynomial(k, degree)
    assert features[0].shape == (6, math.comb(K + degree, degree))
    assert_kernel(*features, q, k, lambda a, b: (1 + dot(a, b)) ** degree)


@pytest.mark.parametrize("degree", [0, 2.0])
def test_a_polynomial_has_a_whole_degree(degree):
    with pytest.raises(ConfigError, match=rf"polynomial: degree is {degree}, expected a whole number of at least 1"):
        maps.polynomial(torch.ones(2), degree)


def test_a_layer_takes_a_function_of_the_users_own_as_its_feature_map():
    x = torch.randn(2, 5, 8)
    made = {}
    for name, feature_map in {"own": lambda q: torch.nn.functional.elu(q) + 1, "named": "elu_plus_one"}.items():
        torch.manual_seed(0)
        made[name] = LinearAttention(8, num_heads=2, feature_map=feature_map)(x)[0]
    torch.testing.assert_close(made["own"], made["named"])
    learned = LinearAttention(8, num_heads=2, feature_map=torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU()))
    learned(x)[0].sum().backward()
    assert learned.feature_map.width == 6
    assert learned.get_parameter("feature_map.function.0.weight").grad.any()
    with pytest.raises(
        ConfigError, match=r"feature_map: it makes \(1, 1, 2\) of \(1, 1, 2, 4\), expected \(\.\.\., K'\)"
    ):
        LinearAttention(8, num_heads=2, feature_map=lambda q: q.sum(-1))
    with pytest.raises(ConfigError, match="linear_attention: feature_map is 3, expected text or a function"):
        LinearAttention(8, num_heads=2, feature_map=3)
    cubic = LinearAttention(8, num_heads=2, feature_map="polynomial", degree=3)
    assert cubic.feature_map.width == math.comb(4 + 3, 3)

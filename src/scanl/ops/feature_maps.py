r"""Feature maps of linear attention: φ writes a kernel, such as softmax's, as an inner product.

.. math:: o_t = \frac{\sum_{j \le t} \kappa(q_t, k_j)\, v_j}{\sum_{j \le t} \kappa(q_t, k_j)},
    \quad \kappa(q, k) = \phi(q)^\top \phi(k)

Each map takes (..., K) to (..., K'), one vector at a time. No step depends on another, so a sequence has the same
features whole or piece by piece. Each docstring states κ. "Exact" maps equal it; random maps equal it in the mean over
projections. Scale q and k beforehand: for softmax's κ = exp(q·k/√K), multiply both by K^(-1/4) and use exp(q·k).
Half precision is computed in float32 and returned in the input's dtype. Integers raise ShapeError.

The projection of a random map is (m, K), or (H, m, K) with one for each head of x (..., H, K).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError

__all__ = [
    "FEATURE_MAPS",
    "arc_cosine_features",
    "cosine_reweighting",
    "dpfp",
    "elu_plus_one",
    "fourier_features",
    "identity",
    "polynomial",
    "positive_random_features",
    "quadratic",
    "random_projection",
    "relu",
    "squared_relu",
    "taylor",
    "trigonometric_random_features",
]


def identity(x: Tensor) -> Tensor:
    """Return x, so that κ(q, k) = q·k. K' = K. Schlag et al., arXiv:2102.11174, unnormalised linear attention."""
    _compute("identity", x)
    return x


def relu(x: Tensor) -> Tensor:
    """Return relu(x): κ(q, k) = relu(q)·relu(k). K' = K. Kasai et al., T2R, arXiv:2103.13076, without its matrix."""
    return _compute("relu", x).relu().to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)²: κ(q, k) = Σ_i relu(q_i)² relu(k_i)². K' = K. So et al., "Primer", arXiv:2109.08668, activation.

    >>> squared_relu(torch.tensor([-1.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    return _compute("squared_relu", x).relu().square().to(x.dtype)


def elu_plus_one(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1, i.e. x + 1 above 0 and e^x below; κ(q, k) = φ(q)·φ(k) > 0. K' = K.

    Katharopoulos et al., arXiv:2006.16236, eq. (7). Differs: below 0 it computes e^x itself. In float32 (e^x - 1) + 1
    rounds to 0 for x < -17, and so would the denominator of attention.

    >>> elu_plus_one(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 3.0]
    """
    wide = _compute("elu_plus_one", x)
    return (wide.clamp(max=0).exp() + wide.relu()).to(x.dtype)


def dpfp(x: Tensor, nu: int = 1) -> Tensor:
    """Deterministic parameter-free projection: products of neighbours among r = relu([x, -x]). K' = 2 K ν.

    φ_{s,i}(x) = r_i r_{i-s} for shifts s = 1..ν, indices modulo 2K, so that
    κ(q, k) = Σ_s Σ_i r_i(q) r_{i-s}(q) r_i(k) r_{i-s}(k).
    nu: ν, from 1 to 2K - 1, else ConfigError.
    Schlag, Irie and Schmidhuber, arXiv:2102.11174, on DPFP. Their layer also divides by Σ φ; here the layer must do so.

    >>> dpfp(torch.tensor([2.0, 3.0])).tolist()  # r = 2 3 0 0, shifted 0 2 3 0
    [0.0, 6.0, 0.0, 0.0]
    """
    wide = _compute("dpfp", x)
    if not isinstance(nu, int) or not 1 <= nu < 2 * x.shape[-1]:
        raise ConfigError(f"dpfp: nu is {nu!r}, expected an integer from 1 to 2K-1={2 * x.shape[-1] - 1}")
    r = torch.cat([wide.relu(), (-wide).relu()], -1)
    return torch.cat([r * r.roll(shift, -1) for shift in range(1, nu + 1)], -1).to(x.dtype)


def taylor(x: Tensor) -> Tensor:
    """κ(q, k) = 1 + q·k + (q·k)²/2, exactly: e^{q·k} to second order, and at least 1/2. K' = 1 + K + K(K+1)/2.

    The features are 1; x_i; x_i²/√2; and x_i x_j for i < j. Arora et al., "Based", arXiv:2402.18668. Differs: they keep
    both x_i x_j and x_j x_i, about twice the features for the same κ.

    >>> [round(v, 4) for v in taylor(torch.tensor([2.0, 3.0])).tolist()]
    [1.0, 2.0, 3.0, 2.8284, 6.0, 6.364]
    """
    wide = _compute("taylor", x)
    return _pairs(wide, 1.0, 1 / math.sqrt(2), lower=True).to(x.dtype)


def polynomial(x: Tensor, degree: int = 2) -> Tensor:
    """κ(q, k) = (1 + q·k)^p, exactly. K' = C(K+p, p): all monomials of the numbers of x of degree at most p.

    A monomial is a product of p factors, each 1 or a number of x; its weight is the root of the number of orders in
    which its factors can stand. With p = 2 the features are 1; √2 x_i; x_i² and √2 x_i x_j for i < j.
    The map of Tsai et al., arXiv:1908.11775, and of Katharopoulos et al., arXiv:2006.16236, section 3.2.1.
    degree: p, at least 1. Raises ConfigError for another.

    >>> [round(v, 4) for v in polynomial(torch.tensor([2.0])).tolist()]  # (1 + 4)² = 1 + 8 + 16
    [1.0, 2.8284, 4.0]
    >>> [round(v**2, 4) for v in polynomial(torch.tensor([2.0]), 3).tolist()]  # (1 + 4)³ = 1 + 3·4 + 3·16 + 64
    [1.0, 12.0, 48.0, 64.0]
    """
    wide = _compute("polynomial", x)
    if not isinstance(degree, int) or degree < 1:
        raise ConfigError(f"polynomial: degree is {degree!r}, expected a whole number of at least 1")
    return _monomials(torch.nn.functional.pad(wide, (1, 0), value=1.0), degree).to(x.dtype)


def quadratic(x: Tensor) -> Tensor:
    """κ(q, k) = (q·k)², exactly. K' = K(K+1)/2. Features x_i² and √2 x_i x_j for i < j, row by row.

    Aksenov et al., "ReBased", arXiv:2402.10644, section 4, without its norm.

    >>> [round(v, 4) for v in quadratic(torch.tensor([2.0, 3.0])).tolist()]  # 4; √2 · 6; 9
    [4.0, 8.4853, 9.0]
    """
    return _pairs(_compute("quadratic", x), math.sqrt(2), 1.0).to(x.dtype)


def cosine_reweighting(x: Tensor, positions: Tensor, horizon: int | float) -> Tensor:
    """cosFormer: κ(q_i, k_j) = relu(q_i)·relu(k_j) cos(π(i - j)/(2M)), exactly. K' = 2K.

    φ(x_t) = relu(x_t) (cos(πt/2M), sin(πt/2M)). x: (B, T, ..., K), or (T, K).   positions: t of every step, (T,) or
    (B, T), integers or not. Only differences of positions matter. To continue a sequence, continue its positions.
    horizon: M > 0, the same in every call: κ >= 0 as long as |i - j| <= M. Angles are computed in double.
    Qin et al., arXiv:2202.08791, section 3.

    >>> [round(v, 4) for v in cosine_reweighting(torch.tensor([[2.0]]), torch.tensor([1]), 3)[0].tolist()]  # π/6
    [1.7321, 1.0]
    """
    wide = _compute("cosine_reweighting", x)
    time = min(1, x.ndim - 2)
    if x.ndim < 2:
        raise ShapeError(f"cosine_reweighting: x has shape {tuple(x.shape)}, expected (B, T, ..., K) or (T, K)")
    if not isinstance(positions, Tensor) or positions.shape not in (x.shape[time : time + 1], x.shape[: time + 1]):
        result = (
            f"shape {tuple(positions.shape)}" if isinstance(positions, Tensor) else f"type {type(positions).__name__}"
        )
        expected = " or ".join(str(tuple(x.shape[start : time + 1])) for start in range(time, -1, -1))
        raise ShapeError(f"cosine_reweighting: positions has {result}, expected {expected} because of x")
    if not horizon > 0:
        raise ConfigError(f"cosine_reweighting: horizon is {horizon!r}, expected a number > 0")
    angle = positions.to(x.device, torch.float64) * (math.pi / 2 / horizon)
    angle = angle.view(*angle.shape, *(1,) * (x.ndim - 1 - time))
    r = wide.relu()
    return torch.cat([r * angle.cos().to(r.dtype), r * angle.sin().to(r.dtype)], -1).to(x.dtype)


def positive_random_features(x: Tensor, projection: Tensor) -> Tensor:
    """FAVOR+: φ(x) = exp(Wx - ‖x‖²/2)/√m > 0; the mean of φ(q)·φ(k) over W is exp(q·k). K' = m.

    projection: W, (m, K), with rows from N(0, I): see `random_projection`. Choromanski et al., arXiv:2009.14794,
    lemma 1. Differs: no maximum is subtracted and no ε is added. For keys the paper's maximum runs over time, so early
    features would depend on later keys and a sequence could not be continued. Overflow does not require it:
    w·x - ‖x‖²/2 <= ‖w‖²/2, about K/2, which float32 and bfloat16 hold up to K = 128 and float16 up to K = 16, roughly.
    For ‖x‖ far above 13, all features of x may be 0 in float32. You may divide a query's features by any factor of
    that query, such as their maximum over m: normalised attention cancels it.

    >>> phi = positive_random_features(torch.tensor([2.0]), torch.tensor([[1.0], [-1.0]]))
    >>> [round(v, 4) for v in phi.tolist()]  # e^(2-2)/√2, e^(-2-2)/√2
    [0.7071, 0.013]
    """
    wide, w = _project("positive_random_features", x, projection)
    return ((_rows(wide, w) - _half_square(wide)).exp() / math.sqrt(w.shape[-2])).to(x.dtype)


def trigonometric_random_features(x: Tensor, projection: Tensor) -> Tensor:
    """φ(x) = e^{‖x‖²/2}/√m (sin Wx, cos Wx); the mean of φ(q)·φ(k) over W is exp(q·k). K' = 2m.

    The features are signed, so a small denominator may become negative. e^{‖x‖²/2} grows without bound: keep ‖x‖ small.
    projection: W, (m, K), rows from N(0, I). Choromanski et al., arXiv:2009.14794, section 2.3.

    >>> phi = trigonometric_random_features(torch.tensor([1.0]), torch.tensor([[0.5]]))
    >>> [round(v, 4) for v in phi.tolist()]  # e^.5 = 1.6487, times sin .5 and cos .5
    [0.7904, 1.4469]
    """
    wide, w = _project("trigonometric_random_features", x, projection)
    return (_half_square(wide).exp() * _fourier(wide, w)).to(x.dtype)


def fourier_features(x: Tensor, projection: Tensor) -> Tensor:
    """φ(x) = (sin Wx, cos Wx)/√m; the mean of φ(q)·φ(k) over W is exp(-‖q - k‖²/2), and φ(x)·φ(x) = 1. K' = 2m.

    For vectors of unit length this is exp(q·k)/e. Multiplying the columns of W by σ gives the kernel of σ ⊙ x.
    Peng et al., "Random Feature Attention", arXiv:2103.02143, theorem 1, after Rahimi and Recht (2007).

    >>> [round(v, 4) for v in fourier_features(torch.tensor([1.0]), torch.tensor([[0.5]])).tolist()]  # sin .5, cos .5
    [0.4794, 0.8776]
    """
    wide, w = _project("fourier_features", x, projection)
    return _fourier(wide, w).to(x.dtype)


def arc_cosine_features(x: Tensor, projection: Tensor) -> Tensor:
    """φ(x) = ReLU(Wx)/√m >= 0; the mean of φ(q)·φ(k) over W is ‖q‖‖k‖ (sin θ + (π - θ) cos θ) / (2π). K' = m.

    θ is the angle between q and k. projection: W, (m, K), rows from N(0, I). This is the arc-cosine kernel of order 1.
    Peng et al., "Random Feature Attention", arXiv:2103.02143, appendix, after Cho and Saul (2009).

    >>> phi = arc_cosine_features(torch.tensor([2.0]), torch.tensor([[1.0], [-1.0]]))
    >>> [round(v, 4) for v in phi.tolist()]  # 2/√2, 0
    [1.4142, 0.0]
    """
    wide, w = _project("arc_cosine_features", x, projection)
    return (_rows(wide, w).relu() / math.sqrt(w.shape[-2])).to(x.dtype)


def random_projection(
    features: int,
    dim: int,
    *,
    generator: torch.Generator | None = None,
    orthogonal: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Draw W for the random maps: (features, dim), every row distributed as N(0, I).

    orthogonal: rows are orthogonal in blocks of `dim`, with lengths drawn separately, distributed like the lengths
    of Gaussian vectors. This lowers the variance of the maps and keeps their mean. Choromanski et al.,
    arXiv:2009.14794, section 2.4. If False, rows are independent.
    generator: the random generator, on its own device; the CPU's global one if None. Every dtype gets the same numbers,
    to rounding.

    >>> W = random_projection(3, 3, generator=torch.Generator().manual_seed(0))
    >>> bool((W[0] @ W[1]).abs() < 1e-5)
    True
    """
    if features < 1 or dim < 1:
        raise ConfigError(f"random_projection: features={features} and dim={dim}, expected at least 1 each")
    drawn = {"generator": generator, "dtype": torch.float64, "device": generator.device if generator else "cpu"}
    w = torch.randn(features, dim, **drawn)
    if orthogonal:
        lengths = w.norm(dim=1, keepdim=True)
        q, r = torch.linalg.qr(torch.randn(-(-features // dim), dim, dim, **drawn))
        # Multiplied by the signs of R's diagonal, Q is uniform over rotations and reflections; so each row is uniform.
        q = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
        w = q.flatten(0, 1)[:features] * lengths
    return w.to(device or "cpu", dtype or torch.get_default_dtype())


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    function.__name__: function
    for function in (identity, relu, squared_relu, elu_plus_one, dpfp, taylor, polynomial, quadratic)
}  # the maps whose only argument is x


def _pairs(x: Tensor, different: float, same: float, *, lower: bool = False) -> Tensor:
    """Return x_i x_j for i <= j, row by row, times `different`, or `same` where i = j.

    lower: return 1 and `different` x_i before them.
    Products with matrices of zeros and one number a column select the factors. They are many times as fast as indices,
    whose gradient adds numbers one by one.
    """
    x = torch.nn.functional.pad(x, (1, 0), value=1.0) if lower else x
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    weights = torch.full_like(i, different, dtype=x.dtype).masked_fill(i == j, same).masked_fill(i + j < lower, 1)
    lhs, rhs = (torch.nn.functional.one_hot(index, x.shape[-1]).mT.to(x.dtype) for index in (i, j))
    return (x @ lhs) * (x @ (rhs * weights))


def _monomials(x: Tensor, degree: int) -> Tensor:
    """Return the monomials of this degree, each times the root of the number of ways to order its factors.

    Monomials whose first factor is x_i are x_i times the last monomials of one degree less, in x_i, x_{i+1}, ...
    """
    width = x.shape[-1]
    product, sizes = x, list(range(width, 0, -1))  # sizes: how many monomials have no factor before x_i
    for _ in range(degree - 1):
        count = product.shape[-1]
        product = torch.cat([x[..., i : i + 1] * product[..., count - size :] for i, size in enumerate(sizes)], -1)
        sizes = [sum(sizes[i:]) for i in range(width)]
    factors = torch.combinations(torch.arange(width), degree, with_replacement=True)
    counts = torch.nn.functional.one_hot(factors, width).sum(1).double()
    return product * torch.exp((math.lgamma(degree + 1) - torch.lgamma(counts + 1).sum(1)) / 2).to(x)


def _fourier(x: Tensor, w: Tensor) -> Tensor:
    angle = _rows(x, w)
    return torch.cat([angle.sin(), angle.cos()], -1) / math.sqrt(w.shape[-2])


def _rows(x: Tensor, w: Tensor) -> Tensor:
    """Return the inner products of x with the rows of w, or of each head's w."""
    return x @ w.mT if w.ndim == 2 else torch.einsum("...hk,hmk->...hm", x, w)


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


def _compute(who: str, x: Tensor) -> Tensor:
    """Cast x to float32 or wider."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ShapeError(f"{who}: x is {kind}, expected a tensor of a real floating dtype")
    if x.ndim == 0:
        raise ShapeError(f"{who}: x has shape (), expected (..., K)")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _project(who: str, x: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Cast x and W to one dtype."""
    wide = _compute(who, x)
    if not isinstance(projection, Tensor) or not projection.is_floating_point():
        kind = str(getattr(projection, "dtype", type(projection).__name__)).removeprefix("torch.")
        raise ShapeError(f"{who}: projection is {kind}, expected a tensor of a real floating dtype")
    heads = projection.shape[:-2]
    fits = projection.ndim in (2, 3) and heads == x.shape[-2:-1][: len(heads)] and projection.shape[-1] == x.shape[-1]
    if not fits or projection.shape[-2] == 0:
        form = f"(m, K) with K={x.shape[-1]} from x"
        if projection.ndim == 3:
            form = f"(H, m, K) with H and K of x's shape {tuple(x.shape)}"
        raise ShapeError(f"{who}: projection has shape {tuple(projection.shape)}, expected {form} and m > 0")
    if projection.device != x.device:
        raise ShapeError(f"{who}: projection is on {projection.device}, expected {x.device} because of x")
    return wide, projection.to(wide.dtype)

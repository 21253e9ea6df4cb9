"""A dynamical system that is reconstructed from what is observed of it."""

import functools
import inspect
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.layers.base import Layer, widen
from scanl.layers.designation import Designation, make_layer
from scanl.layers.parts.cell_layer import CellLayer
from scanl.layers.state import Device, DType
from scanl.models.saving import Saved
from scanl.ops import backend
from scanl.ops.cell import Cell
from scanl.options import at_least

if TYPE_CHECKING:
    from scanl.data.batch import Batch


class Dynamics(Saved):
    r"""A recurrent layer whose first N units are the observed quantities; it runs from its own state, without input.

    .. math:: z_t = F(\tilde z_{t-1}), \quad \tilde z_t = (1 - \alpha) z_t + \alpha \hat z_t, \quad \hat y_t = z_t[:N]

    ẑ is the state with the observation x_t in its first N units. `forcing` is α of calls: 0 runs freely, 1 begins each
    step at the data (teacher forcing). The other units are never forced.

    Source: Hess, Monfared, Brenner and Durstewitz, "Generalized Teacher Forcing for Learning Chaotic Dynamics",
    arXiv:2306.04406, eq. (4) and (5).
    """

    name = "dynamics"

    def __init__(
        self,
        observed: Annotated[int, at_least(1), "N, observed quantities"],
        dim: Annotated[int, at_least(1), "D, units of the layer; its state is (B, D)"],
        layer: Annotated[
            Designation, "a registered layer with a state (B, D), or a class of your own"
        ] = "shallow_plrnn",
        layer_options: Annotated[dict[str, object] | None, "the layer's options"] = None,
    ) -> None:
        super().__init__()
        if observed > dim:
            raise ConfigError(f"dynamics: observed is {observed}, expected at most dim={dim}")
        self.observed, self.dim, self.forcing = observed, dim, 0.0
        self.layer: Layer = make_layer(layer, dim, layer_options or {})
        state = self.layer.init_state(1)
        if not isinstance(state, Tensor) or state.shape != (1, dim):
            raise ConfigError(f"dynamics: layer is {layer!r}, expected one whose state is a single tensor (B, {dim})")

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self.layer.init_state(batch_size, device=device, dtype=dtype)

    def forced(self, z: Tensor, x: Tensor, forcing: float) -> Tensor:
        """Return z̃ (B, D): the first N units of z (B, D) moved towards x (B, N) by `forcing`."""
        return torch.cat([torch.lerp(z[:, : self.observed], x.to(z), forcing), z[:, self.observed :]], 1)

    def step(self, z: Tensor) -> Tensor:
        """Return F(z) (B, D) of states (B, D)."""
        with backend("parallel", "reference"):  # to call a kernel for a single step takes three times as long
            return self.layer.step(torch.zeros_like(z, dtype=next(self.layer.parameters()).dtype), z)[1]

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map observations x (B, T, N) to predictions of the next ones y (B, T, N), y_t of x_{t+1}, and the state.

        state: z (B, D), the prediction of the units at x's first step; None begins at the data. Raises ShapeError for a
        wrong shape of x.
        """
        if x.ndim != 3 or x.shape[2] != self.observed:
            raise ShapeError(f"dynamics: x has shape {tuple(x.shape)}, expected (B, T, {self.observed})")
        z = self.init_state(len(x), device=x.device) if state is None else state
        if state is None and x.shape[1]:
            z = self.forced(z, x[:, 0], 1.0)
        return self._orbit(x, z, self.forcing)

    def _orbit(self, x: Tensor, z: Tensor, forcing: float) -> tuple[Tensor, Tensor]:
        """Return the predictions (B, T, N) and the last state from z (B, D), which x (B, T, N) draws."""
        layer = self.layer
        hooked = layer._forward_hooks or layer._forward_pre_hooks
        # with the data it is a cell too, so one call of a kernel runs all steps: ten times as fast
        if isinstance(layer, CellLayer) and type(layer).run is CellLayer.run and not hooked:
            drive = z.new_zeros(*x.shape[:2], self.dim, dtype=next(layer.parameters()).dtype)
            operands = [value if value is None else widen(value) for value in layer.operands(drive)]
            data = F.pad(widen(x.to(z)), (0, self.dim - self.observed))
            strength = data.new_full((self.dim,), forcing)
            strength[self.observed :] = 0
            known = [*operands, data, strength, z]
            states, z = layer.run_cell(driven(layer.cell), *known, cu_seqlens=None, **layer.options())
            return states[..., : self.observed], z
        predictions = []
        for t in range(x.shape[1]):
            z = self.step(self.forced(z, x[:, t], forcing))
            predictions.append(z[:, : self.observed])
        return (torch.stack(predictions, 1) if predictions else x.clone()), z

    def loss(self, batch: "Batch", state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean squared error of the predictions, with the batch's targets (B, T, N), and the state."""
        y, state = self(batch.inputs, state)
        return F.mse_loss(y, batch.targets.to(y)), state

    @torch.no_grad()
    def run(self, x: Tensor, steps: int) -> Tensor:
        """Run freely for `steps` steps from observations x (B, N): return (B, steps, N)."""
        z = self.forced(self.init_state(len(x), device=x.device), x, 1.0)
        return self._orbit(x.new_zeros(len(x), steps, self.observed), z, 0.0)[0]


@functools.cache
def driven(cell: Cell) -> Cell:
    """Return the cell of states z (B, D) that data draws before each step: z_t = f(z_{t-1} + α * (data_t - z_{t-1})).

    It has two further operands before the state: data (B, T, D), and strength, which is α of each unit, (D,). Its
    output is the state.
    """

    def step(*values: Any, **options: Any) -> tuple[Tensor, Tensor]:
        *operands, data, strength, state = values
        z = cell.step(*operands, state + strength * (data - state), **options)[1]
        return z, z

    declared = inspect.signature(cell.step)
    *parameters, state = [value for name, value in declared.parameters.items() if name not in cell.options]
    more = [state.replace(name=name) for name in ("data", "strength")]
    keywords = [declared.parameters[name] for name in cell.options]
    step.__name__ = f"driven_{cell.name}"
    step.__signature__ = declared.replace(parameters=[*parameters, *more, state, *keywords])  # pyright: ignore[reportFunctionMemberAccess]
    lines = [f"{v.name}{'?' * v.optional}: {' | '.join(map(' '.join, v.choices))}" for v in cell.operands]
    line = ", ".join([*lines[:-1], "data: B T D", "strength: D", lines[-1]])
    return Cell(step, f"{line} -> B T D", equation=cell.equation, source=cell.source, static=tuple(cell.static))


def dynamics_loss(model: Dynamics, batch: "Batch", state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `model.loss(batch, state)`, in the form that a learning algorithm calls."""
    return model.loss(batch, state)


class Spectrum(NamedTuple):
    """Two distances of a reconstructed system from the observed one, 0 for equal orbits.

    states: the Kullback-Leibler divergence of the histograms of observed points.   spectra: the mean over the
    quantities of the Hellinger distance between smoothed power spectra.
    """

    states: float
    spectra: float


def distance(orbit: Tensor, observed: Tensor, *, bins: int = 30, smooth: float = 20.0) -> Spectrum:
    """Compare a free orbit (T, N) with observations (S, N).

    bins: of the histogram in each quantity, over the range of the observations.   smooth: width of a Gaussian that
    smooths the spectra, in frequencies.

    Source: Hess et al., arXiv:2306.04406, sec. 4.1 and appendix (D_stsp by binning, D_H). Empty bins count 1e-6 of a
    point, so the divergence is finite. Raises ShapeError for orbits of different quantities, and for fewer steps than
    the smoothing of a spectrum reads.
    """
    if orbit.ndim != 2 or observed.ndim != 2 or orbit.shape[1] != observed.shape[1]:
        raise ShapeError(
            f"distance: orbit has shape {tuple(orbit.shape)} and observed {tuple(observed.shape)}, expected (T, N) and "
            "(S, N)"
        )
    least = 8 * int(smooth) + 2
    if min(len(orbit), len(observed)) < least:
        raise ShapeError(
            f"distance: orbit has {len(orbit)} steps and observed {len(observed)}, expected at least {least} because "
            f"of smooth={smooth:g}; give a smaller one"
        )
    low, high = observed.amin(0), observed.amax(0)

    def histogram(points: Tensor) -> Tensor:
        place = ((points - low) / (high - low) * bins).floor().clamp(-1, bins).long()
        inside = ((place >= 0) & (place < bins)).all(1)
        index = sum(place[inside, n] * bins**n for n in range(points.shape[1]))
        counts = torch.zeros(bins ** points.shape[1], dtype=torch.float64)
        counts.index_add_(0, torch.as_tensor(index), torch.ones(int(inside.sum()), dtype=torch.float64))
        return (counts + 1e-6) / (len(points) + 1e-6 * len(counts))  # points outside count: they lower all others

    def spectrum(points: Tensor) -> Tensor:
        steps = min(len(orbit), len(observed))
        centered = points[:steps].double() - points[:steps].double().mean(0)
        power = torch.fft.rfft(centered, dim=0).abs().square()
        offsets = torch.arange(-int(4 * smooth), int(4 * smooth) + 1, dtype=torch.float64)
        kernel = torch.exp(-0.5 * (offsets / smooth) ** 2)
        padded = F.pad(power.T[:, None], (len(offsets) // 2, len(offsets) // 2), mode="reflect")
        smoothed = F.conv1d(padded, (kernel / kernel.sum())[None, None])[:, 0]
        return smoothed / smoothed.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)

    p, q = histogram(observed.double()), histogram(orbit.nan_to_num(torch.inf).double())
    apart = 1 - (spectrum(observed) * spectrum(orbit.nan_to_num(0.0))).sqrt().sum(1)
    return Spectrum((p * (p / q).log()).sum().item(), apart.clamp_min(0).sqrt().mean().item())

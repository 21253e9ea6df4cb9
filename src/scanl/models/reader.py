"""The common part of models that read tokens or features: the map of their input, and the stack behind it."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.layers.packing import pack, restarted
from scanl.layers.parts.timespans import check_timespans
from scanl.layers.state import Device, DType, State
from scanl.models.embedding import check_tensor, check_tokens, embedded
from scanl.models.inputs import Features, Scales, Tokens
from scanl.models.saving import Saved
from scanl.models.stack import Backbone
from scanl.ops.offsets import check_starts


class Standard(nn.Module):
    """Standardise channels: (x - location) / scale, in float64.

    The numbers come from the configuration and are not weights. They stay in float64 when the model is cast, because a
    float32 near 1e8 has no decimals. So cast the standardised numbers, not the inputs.

    scales: (location, scale) of each channel; None changes nothing.
    """

    location: Tensor
    scale: Tensor

    def __init__(self, who: str, channels: int, scales: Scales | None) -> None:
        super().__init__()
        pairs = [[0.0, 1.0]] * channels if scales is None else [list(map(float, pair)) for pair in scales]
        if len(pairs) != channels or any(len(pair) != 2 or not 0 < pair[1] < math.inf for pair in pairs):
            raise ConfigError(
                f"{who}: scales is {scales}, expected a location and a scale above 0 for each of {channels} channels"
            )
        both = torch.tensor(pairs, dtype=torch.float64).reshape(channels, 2)
        for name, values in (("location", both[:, 0]), ("scale", both[:, 1])):
            self.register_buffer(name, values.contiguous(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the numbers as torch says, but keep them in float64."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, values in exact.items():
            moved = self._buffers[name]
            if values is not None and moved is not None and moved.dtype != values.dtype:
                self._buffers[name] = values.to(moved.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() - self.location) / self.scale


class FeatureEmbedding(nn.Linear):
    """A linear map of features. missing: NaN is read as 0, and a flag for each feature says whether it is known."""

    def __init__(self, channels: int, dim: int, missing: bool = False) -> None:
        super().__init__(channels * 2 if missing else channels, dim)
        self.missing = missing

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.missing:
            known = ~x.isnan()
            x = torch.cat([torch.where(known, x, 0), known.to(x.dtype)], -1)
        return super().forward(x.to(self.weight.dtype) if not torch.is_autocast_enabled(x.device.type) else x)


Inputs = Annotated[Tokens | Features, "what is read: `Tokens(vocab_size)` or `Features(channels)`"]
AnyStack = Annotated[Backbone, "the layers between the input and the head; bidirectional ones are allowed"]


class Reader(Saved):
    """A model that reads tokens (B, T) or features (B, T, C) with a stack of blocks. Abstract."""

    def __init__(self, stack: Backbone, inputs: Tokens | Features) -> None:
        super().__init__()
        self.inputs, self.standard = inputs, None
        if isinstance(inputs, Tokens):
            self.input = nn.Embedding(inputs.vocab_size, stack.dim)
            nn.init.normal_(self.input.weight, std=0.02)
        else:
            self.input = FeatureEmbedding(inputs.channels, stack.dim, inputs.missing)
            if inputs.scales is not None:
                self.standard = Standard(self._who(), inputs.channels, inputs.scales)
        self.stack = stack

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Any:
        """Return the state before any step."""
        raise NotImplementedError

    def _hidden(
        self,
        x: Tensor,
        state: State | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        timespans: Tensor | None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, State, Tensor | None]:
        """Return the features of the steps, the state of the stack, and the offsets if the rows are packed."""
        check_starts(self._who(), starts, x)
        x, cu_seqlens, timespans = self._input(x, mask, cu_seqlens, timespans)
        if starts is None:
            y, after = self.stack(x, state, cu_seqlens=cu_seqlens, timespans=timespans)
        else:
            y, after = restarted(
                self._who(), self.stack, self.stack.init_state, x, state, cu_seqlens,
                starts if mask is None else pack(starts, mask)[0], timespans=timespans,
            )  # fmt: skip
        return y, after, cu_seqlens

    def _input(
        self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the checked inputs of the stack: the mapped input, the offsets of packed rows, the durations."""
        if isinstance(self.inputs, Tokens):
            check_tokens(self._who(), "x", x)
        else:
            shape = f"(B, T, {self.inputs.channels})"
            check_tensor(self._who(), "x", x, shape)
            if x.ndim != 3 or x.shape[2] != self.inputs.channels:
                raise ShapeError(f"{self._who()}: x has shape {tuple(x.shape)}, expected {shape}")
        check_timespans(self._who(), timespans, x)
        if mask is not None:
            if cu_seqlens is not None:
                raise ShapeError(f"{self._who()}: mask and cu_seqlens are both given, expected one of them")
            timespans = timespans if timespans is None else pack(timespans, mask)[0]
            x, cu_seqlens = pack(x, mask)
        if self.standard is not None:
            x = self.standard(x).to(torch.promote_types(self.input.weight.dtype, torch.float32))
        x = embedded(self._who(), self.input, x) if isinstance(self.input, nn.Embedding) else self.input(x)
        return x, cu_seqlens, timespans

"""What a type checker sees of calls. `make lint` reads this file: an error that is ignored here has to be one."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

from torch import Tensor

from scanl import ops
from scanl.layers import S4D, Hawk, Layer
from scanl.layers.ssm.hawk import HawkState
from scanl.models import LanguageModel, SequenceClassifier, Stack
from scanl.models.block import BlockState
from scanl.models.pooling import PooledState


def layers(x: Tensor, layer: Layer, hawk: Hawk, s4d: S4D) -> None:
    """A call of a layer has the type of its `run`, and so has one of a model."""
    assert_type(layer(x), tuple[Tensor, Any])
    assert_type(hawk(x, cu_seqlens=x), tuple[Tensor, HawkState])
    assert_type(s4d(x, timespans=x), tuple[Tensor, Tensor])
    layer(x, timespans=x)  # pyright: ignore[reportCallIssue]
    hawk()  # pyright: ignore[reportCallIssue]


def models(x: Tensor, stack: Stack, model: LanguageModel, classifier: SequenceClassifier) -> None:
    assert_type(stack(x), tuple[Tensor, tuple[BlockState, ...]])
    assert_type(model(x, mask=x), tuple[Tensor, Any])
    assert_type(classifier(x), tuple[Tensor, PooledState])
    model(x, cu_seqlens=3)  # pyright: ignore[reportArgumentType]


def ops_with_right_arguments(x: Tensor, packed: Tensor | None) -> None:
    assert_type(ops.linear_scan(x, x), tuple[Tensor, Tensor])
    assert_type(
        ops.linear_scan(x, a=x, state=None, reverse=True, cu_seqlens=packed, starts=packed, backend="cpu"),
        tuple[Tensor, Tensor],
    )
    assert_type(ops.linear_attention(x, x, x, x, u=x, scale=1.0)[1], Tensor)
    assert_type(ops.linear_scan.explain(x, x), str)


def ops_with_wrong_arguments(x: Tensor) -> None:
    ops.linear_scan(1, x)  # pyright: ignore[reportArgumentType]
    ops.linear_scan(x)  # pyright: ignore[reportCallIssue]
    ops.linear_scan(x, x, revers=True)  # pyright: ignore[reportCallIssue]
    ops.linear_scan(x, x, cu_seqlens=[0, 4])  # pyright: ignore[reportArgumentType]
    ops.linear_scan(x, x, starts=[True])  # pyright: ignore[reportArgumentType]
    ops.linear_scan(x, x, scale=1.0)  # pyright: ignore[reportCallIssue]
    ops.linear_attention(x, x, x, scale="1")  # pyright: ignore[reportArgumentType]

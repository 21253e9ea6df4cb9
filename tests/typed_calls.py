"""Read by pyright alone: a call of a layer or a model has the signature of its `forward`."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

from torch import Tensor

from scanl.layers import S4D, Hawk, Layer
from scanl.layers.ssm.hawk import HawkState
from scanl.models import LanguageModel, SequenceClassifier, Stack
from scanl.models.block import BlockState
from scanl.models.classifier import ClassifierState


def calls(
    layer: Layer, hawk: Hawk, s4d: S4D, stack: Stack, model: LanguageModel, classifier: SequenceClassifier
) -> None:
    x = Tensor()
    assert_type(layer(x), tuple[Tensor, Any])
    assert_type(hawk(x, cu_seqlens=x), tuple[Tensor, HawkState])
    assert_type(s4d(x, timespans=x), tuple[Tensor, Tensor])
    layer(x, timespans=x)  # pyright: ignore[reportCallIssue]
    hawk()  # pyright: ignore[reportCallIssue]


def calls_of_models(x: Tensor, stack: Stack, model: LanguageModel, classifier: SequenceClassifier) -> None:
    assert_type(stack(x), tuple[Tensor, tuple[BlockState, ...]])
    assert_type(model(x, mask=x), tuple[Tensor, tuple[BlockState, ...]])
    assert_type(classifier(x), tuple[Tensor, ClassifierState])
    model(x, cu_seqlens=3)  # pyright: ignore[reportArgumentType]

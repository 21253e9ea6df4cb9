"""Trainable models: a language model, a sequence classifier, and the stack of layers that both use."""

from scanl.layers.channel.gated_mlp import GatedMLP as GatedMLP
from scanl.models.block import Block as Block
from scanl.models.classifier import SequenceClassifier as SequenceClassifier
from scanl.models.generation import Generation as Generation
from scanl.models.language_model import LanguageModel as LanguageModel
from scanl.models.presets import presets as presets
from scanl.models.saving import Saved as Saved
from scanl.models.stack import Stack as Stack

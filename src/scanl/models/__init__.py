"""Trainable models of sequences, and the stack of layers that all of them use."""

from scanl.layers.channel.gated_mlp import GatedMLP as GatedMLP
from scanl.layers.channel.mlp import MLP as MLP
from scanl.models.block import Block as Block
from scanl.models.classifier import SequenceClassifier as SequenceClassifier
from scanl.models.distillation import distil_model as distil_model
from scanl.models.dna import Caduceus as Caduceus
from scanl.models.dna import HyenaDNA as HyenaDNA
from scanl.models.forecaster import Forecast as Forecast
from scanl.models.forecaster import Forecaster as Forecaster
from scanl.models.generation import Generation as Generation
from scanl.models.labeller import SequenceLabeller as SequenceLabeller
from scanl.models.language_model import LanguageModel as LanguageModel
from scanl.models.mega import MegalodonModel as MegalodonModel
from scanl.models.mega import MegaModel as MegaModel
from scanl.models.policy import Policy as Policy
from scanl.models.presets import presets as presets
from scanl.models.regressor import SequenceRegressor as SequenceRegressor
from scanl.models.s4nd import S4ND as S4ND
from scanl.models.sashimi import SashimiModel as SashimiModel
from scanl.models.saving import Saved as Saved
from scanl.models.soft_prompt import SoftPrompt as SoftPrompt
from scanl.models.spacetime import SpaceTimeNet as SpaceTimeNet
from scanl.models.stack import Stack as Stack
from scanl.models.vim import Vim as Vim

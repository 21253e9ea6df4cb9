"""Layers: one file per model, and the registry by which everything else finds them."""

from scanl.layers import state as state
from scanl.layers.base import Layer as Layer
from scanl.layers.base import build as build
from scanl.layers.base import get as get
from scanl.layers.base import names as names
from scanl.layers.base import register as register
from scanl.layers.hawk import Hawk as Hawk
from scanl.layers.hgrn import HGRN as HGRN
from scanl.layers.linear_rnn import LinearRNN as LinearRNN
from scanl.layers.lru import LRU as LRU
from scanl.layers.mega_ema import MegaEMA as MegaEMA
from scanl.layers.mingru import MinGRU as MinGRU
from scanl.layers.packing import padded as padded
from scanl.layers.parameters import param_groups as param_groups
from scanl.layers.rglru import RGLRU as RGLRU
from scanl.layers.short_convolution import ShortConvolution as ShortConvolution
from scanl.layers.wrappers import Bidirectional as Bidirectional
from scanl.layers.wrappers import MultiScale as MultiScale

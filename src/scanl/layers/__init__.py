"""Layers: the classes of the registry, imported when they are first used, and what finds and makes them by name."""

from typing import TYPE_CHECKING

from scanl.faces import face
from scanl.layers import attention as attention
from scanl.layers import channel as channel
from scanl.layers import memory as memory
from scanl.layers import ode as ode
from scanl.layers import rnn as rnn
from scanl.layers import rwkv as rwkv
from scanl.layers import ssm as ssm
from scanl.layers import state as state
from scanl.layers.base import Hint as Hint
from scanl.layers.base import Layer as Layer
from scanl.layers.chunks import in_chunks as in_chunks
from scanl.layers.packing import padded as padded
from scanl.layers.parameters import param_groups as param_groups
from scanl.layers.parts.short_convolution import ShortConvolution as ShortConvolution
from scanl.layers.registry import build as build
from scanl.layers.registry import classes as classes
from scanl.layers.registry import get as get
from scanl.layers.registry import names as names
from scanl.layers.registry import preset as preset
from scanl.layers.registry import register as register

if not TYPE_CHECKING:
    __getattr__, __dir__ = face(__name__, classes)

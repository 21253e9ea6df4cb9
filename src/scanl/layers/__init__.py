"""Layers: one file per model, and the registry by which everything else finds them."""

import importlib
import pkgutil

from scanl.layers import state as state
from scanl.layers.aft import AFT as AFT
from scanl.layers.attention import Attention as Attention
from scanl.layers.base import Hint as Hint
from scanl.layers.base import Layer as Layer
from scanl.layers.base import build as build
from scanl.layers.base import get as get
from scanl.layers.base import names as names
from scanl.layers.base import register as register
from scanl.layers.deltanet import DeltaNet as DeltaNet
from scanl.layers.gated_deltanet import GatedDeltaNet as GatedDeltaNet
from scanl.layers.gateloop import GateLoop as GateLoop
from scanl.layers.gla import GLA as GLA
from scanl.layers.h3 import H3 as H3
from scanl.layers.hawk import Hawk as Hawk
from scanl.layers.hgrn import HGRN as HGRN
from scanl.layers.hyena import Hyena as Hyena
from scanl.layers.linear_attention import LinearAttention as LinearAttention
from scanl.layers.linear_rnn import LinearRNN as LinearRNN
from scanl.layers.lru import LRU as LRU
from scanl.layers.mamba import Mamba as Mamba
from scanl.layers.mamba2 import Mamba2 as Mamba2
from scanl.layers.mega_ema import MegaEMA as MegaEMA
from scanl.layers.mingru import MinGRU as MinGRU
from scanl.layers.mlstm import MLSTM as MLSTM
from scanl.layers.mlstm_large import MLSTMLarge as MLSTMLarge
from scanl.layers.packing import padded as padded
from scanl.layers.parameters import param_groups as param_groups
from scanl.layers.retnet import RetNet as RetNet
from scanl.layers.rglru import RGLRU as RGLRU
from scanl.layers.rwkv4 import RWKV4 as RWKV4
from scanl.layers.rwkv6 import RWKV6 as RWKV6
from scanl.layers.rwkv7 import RWKV7 as RWKV7
from scanl.layers.s4 import S4 as S4
from scanl.layers.s4d import S4D as S4D
from scanl.layers.s5 import S5 as S5
from scanl.layers.short_convolution import ShortConvolution as ShortConvolution
from scanl.layers.slstm import SLSTM as SLSTM
from scanl.layers.torch_cells import GRU as GRU
from scanl.layers.torch_cells import LSTM as LSTM
from scanl.layers.torch_cells import Elman as Elman
from scanl.layers.window_attention import WindowAttention as WindowAttention
from scanl.layers.wrappers import Bidirectional as Bidirectional
from scanl.layers.wrappers import MultiScale as MultiScale

for _file in pkgutil.iter_modules(__path__):  # a new model is one new file: importing it registers it
    importlib.import_module(f"{__name__}.{_file.name}")

"""Layers, one file per model, and their registry."""

import importlib
import pkgutil

from scanl.layers import state as state
from scanl.layers.attention.attention import Attention as Attention
from scanl.layers.attention.window_attention import WindowAttention as WindowAttention
from scanl.layers.base import Hint as Hint
from scanl.layers.base import Layer as Layer
from scanl.layers.base import build as build
from scanl.layers.base import get as get
from scanl.layers.base import names as names
from scanl.layers.base import preset as preset
from scanl.layers.base import register as register
from scanl.layers.linear_rnn import LinearRNN as LinearRNN
from scanl.layers.memory.deltanet import DeltaNet as DeltaNet
from scanl.layers.memory.gated_deltanet import GatedDeltaNet as GatedDeltaNet
from scanl.layers.memory.gateloop import GateLoop as GateLoop
from scanl.layers.memory.gla import GLA as GLA
from scanl.layers.memory.linear_attention import LinearAttention as LinearAttention
from scanl.layers.memory.mlstm import MLSTM as MLSTM
from scanl.layers.memory.mlstm_large import MLSTMLarge as MLSTMLarge
from scanl.layers.memory.retnet import RetNet as RetNet
from scanl.layers.packing import padded as padded
from scanl.layers.parameters import param_groups as param_groups
from scanl.layers.parts.short_convolution import ShortConvolution as ShortConvolution
from scanl.layers.rnn.elman import Elman as Elman
from scanl.layers.rnn.gru import GRU as GRU
from scanl.layers.rnn.hgrn import HGRN as HGRN
from scanl.layers.rnn.lstm import LSTM as LSTM
from scanl.layers.rnn.mingru import MinGRU as MinGRU
from scanl.layers.rnn.slstm import SLSTM as SLSTM
from scanl.layers.rwkv.aft import AFT as AFT
from scanl.layers.rwkv.rwkv4 import RWKV4 as RWKV4
from scanl.layers.rwkv.rwkv6 import RWKV6 as RWKV6
from scanl.layers.rwkv.rwkv7 import RWKV7 as RWKV7
from scanl.layers.ssm.h3 import H3 as H3
from scanl.layers.ssm.hawk import Hawk as Hawk
from scanl.layers.ssm.hyena import Hyena as Hyena
from scanl.layers.ssm.lru import LRU as LRU
from scanl.layers.ssm.mamba import Mamba as Mamba
from scanl.layers.ssm.mamba2 import Mamba2 as Mamba2
from scanl.layers.ssm.mega_ema import MegaEMA as MegaEMA
from scanl.layers.ssm.rglru import RGLRU as RGLRU
from scanl.layers.ssm.s4 import S4 as S4
from scanl.layers.ssm.s4d import S4D as S4D
from scanl.layers.ssm.s5 import S5 as S5
from scanl.layers.wrappers import Bidirectional as Bidirectional
from scanl.layers.wrappers import MultiScale as MultiScale

for _file in pkgutil.walk_packages(__path__, f"{__name__}."):  # importing a file registers its layers
    importlib.import_module(_file.name)

"""The mixers of transformers that run on scanl's ops, a file for each family."""

from scanl.hub.mixers import gated_deltanet as gated_deltanet
from scanl.hub.mixers import kimi_delta_attention as kimi_delta_attention
from scanl.hub.mixers import lightning_attention as lightning_attention
from scanl.hub.mixers import mamba as mamba
from scanl.hub.mixers import mamba2 as mamba2
from scanl.hub.mixers import recurrent_gemma as recurrent_gemma
from scanl.hub.mixers import rwkv as rwkv
from scanl.hub.mixers import short_convolution as short_convolution
from scanl.hub.mixers import xlstm as xlstm
from scanl.hub.mixers.base import Mixer as Mixer
from scanl.hub.mixers.base import get as get
from scanl.hub.mixers.base import names as names

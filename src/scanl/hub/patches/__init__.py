"""Patches that replace modules of transformers and of torch, one file for each kind of recurrence."""

from scanl.hub.patches import gated_deltanet as gated_deltanet
from scanl.hub.patches import kimi_delta_attention as kimi_delta_attention
from scanl.hub.patches import lightning_attention as lightning_attention
from scanl.hub.patches import mamba as mamba
from scanl.hub.patches import mamba2 as mamba2
from scanl.hub.patches import recurrent_gemma as recurrent_gemma
from scanl.hub.patches import rwkv as rwkv
from scanl.hub.patches import short_convolution as short_convolution
from scanl.hub.patches import torch_rnn as torch_rnn
from scanl.hub.patches import xlstm as xlstm
from scanl.hub.patches.base import Patch as Patch
from scanl.hub.patches.base import get as get
from scanl.hub.patches.base import names as names

"""The families of transformers' checkpoints that `LanguageModel` can say exactly, a file for each."""

from scanl.hub.families import falcon_mamba as falcon_mamba
from scanl.hub.families import mamba as mamba
from scanl.hub.families import mamba2 as mamba2
from scanl.hub.families import recurrent_gemma as recurrent_gemma
from scanl.hub.families import rwkv as rwkv
from scanl.hub.families import xlstm as xlstm
from scanl.hub.families.base import Family as Family
from scanl.hub.families.base import blocks as blocks
from scanl.hub.families.base import get as get
from scanl.hub.families.base import names as names

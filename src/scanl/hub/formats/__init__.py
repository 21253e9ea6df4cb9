"""Checkpoint formats of transformers that `LanguageModel` can represent exactly, one file for each model_type."""

from scanl.hub.formats import falcon_mamba as falcon_mamba
from scanl.hub.formats import llama as llama
from scanl.hub.formats import mamba as mamba
from scanl.hub.formats import mamba2 as mamba2
from scanl.hub.formats import recurrent_gemma as recurrent_gemma
from scanl.hub.formats import rwkv as rwkv
from scanl.hub.formats import xlstm as xlstm
from scanl.hub.formats.base import CheckpointLayout as CheckpointLayout
from scanl.hub.formats.base import Format as Format
from scanl.hub.formats.base import blocks as blocks
from scanl.hub.formats.base import get as get
from scanl.hub.formats.base import in_float32 as in_float32
from scanl.hub.formats.base import names as names

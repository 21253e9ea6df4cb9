"""Layouts of the checkpoints that the authors of models write, one file for each program. They are only read."""

from scanl.hub.originals import fla as fla
from scanl.hub.originals import fla_rwkv as fla_rwkv
from scanl.hub.originals import mamba_ssm as mamba_ssm
from scanl.hub.originals import rwkv_lm as rwkv_lm
from scanl.hub.originals import xlstm as xlstm
from scanl.hub.originals.base import Original as Original
from scanl.hub.originals.base import ShapedFile as ShapedFile
from scanl.hub.originals.base import get as get
from scanl.hub.originals.base import names as names

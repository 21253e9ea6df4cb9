"""The mixers of transformers that run on scanl's ops, a file for each family."""

from scanl.hub.mixers import mamba as mamba
from scanl.hub.mixers.base import Mixer as Mixer
from scanl.hub.mixers.base import get as get
from scanl.hub.mixers.base import names as names

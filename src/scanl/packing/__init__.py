"""Bytes packed by what a language model expects of them, and unpacked with the same bits."""

from scanl.faces import public
from scanl.packing.archive import ArchiveMember as ArchiveMember
from scanl.packing.packing import Archive as Archive
from scanl.packing.packing import pack as pack
from scanl.packing.packing import pack_pieces as pack_pieces
from scanl.packing.packing import unpack as unpack
from scanl.packing.packing import unpack_file as unpack_file
from scanl.packing.predictor import ContextsAlone as ContextsAlone
from scanl.packing.predictor import Predictor as Predictor

__dir__ = public(__name__)

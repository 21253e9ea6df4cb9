"""Training data: the protocol of a source, and sources of real data.

A source that `scanl.data.catalogue` describes has its class here too, by the class's name: `scanl.data.ETTh1`.
"""

from typing import Any

from scanl.data.atari import AtariReplay as AtariReplay
from scanl.data.audio import SpeechCommands as SpeechCommands
from scanl.data.babyai import BabyAIDemonstrations as BabyAIDemonstrations
from scanl.data.base import IGNORED as IGNORED
from scanl.data.base import LEVELS as LEVELS
from scanl.data.base import Exam as Exam
from scanl.data.base import Source as Source
from scanl.data.base import register as register
from scanl.data.base import sources as sources
from scanl.data.batch import Batch as Batch
from scanl.data.choices import MMLUQuestions as MMLUQuestions
from scanl.data.chorales import BachChorales as BachChorales
from scanl.data.contours import PublishedPathfinder as PublishedPathfinder
from scanl.data.corpus import Corpus as Corpus
from scanl.data.corpus import read_corpus as read_corpus
from scanl.data.corpus import standard_library as standard_library
from scanl.data.documents import IMDbReviews as IMDbReviews
from scanl.data.folders import Folders as Folders
from scanl.data.forecasts import PublishedSeries as PublishedSeries
from scanl.data.images import Images as Images
from scanl.data.language import PublishedText as PublishedText
from scanl.data.music import PublishedPieces as PublishedPieces
from scanl.data.own_signals import OwnSignals as OwnSignals
from scanl.data.photographs import ImageNetPatches as ImageNetPatches
from scanl.data.pile import PileDocuments as PileDocuments
from scanl.data.questions import Question as Question
from scanl.data.recordings import ArchiveProblem as ArchiveProblem
from scanl.data.sharded_text import ShardedText as ShardedText
from scanl.data.shards.dataset import ShardLoader as ShardLoader
from scanl.data.shards.dataset import Shards as Shards
from scanl.data.table import Table as Table
from scanl.data.text import Streams as Streams
from scanl.data.text import Text as Text
from scanl.data.text import Windows as Windows
from scanl.data.timit import TIMITFrames as TIMITFrames
from scanl.data.translation import IWSLT14Pairs as IWSLT14Pairs
from scanl.data.videos import Skeletons as Skeletons


def __getattr__(name: str) -> Any:
    for known in sources.names():
        if (cls := sources.get(known)).__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    every = map(sources.get, sources.names())
    return sorted(cls.__name__ for cls in every if cls.__module__.startswith(f"{__name__}."))

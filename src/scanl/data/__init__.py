"""Training data: the protocol of a source, and sources of real data.

A source that `scanl.data.catalogue` describes has its class here too, by the class's name: `scanl.data.ETTh1`.
"""

from typing import Any

from scanl.data.base import IGNORED as IGNORED
from scanl.data.base import LEVELS as LEVELS
from scanl.data.base import Exam as Exam
from scanl.data.base import Source as Source
from scanl.data.base import register as register
from scanl.data.base import sources as sources
from scanl.data.batch import Batch as Batch
from scanl.data.folders.folders import Folders as Folders
from scanl.data.folders.own_signals import OwnSignals as OwnSignals
from scanl.data.published.atari import AtariReplay as AtariReplay
from scanl.data.published.audio import SpeechCommands as SpeechCommands
from scanl.data.published.babyai import BabyAIDemonstrations as BabyAIDemonstrations
from scanl.data.published.choices import MMLUQuestions as MMLUQuestions
from scanl.data.published.chorales import BachChorales as BachChorales
from scanl.data.published.classified_series import ArchiveProblem as ArchiveProblem
from scanl.data.published.contours import PublishedPathfinder as PublishedPathfinder
from scanl.data.published.documents import IMDbReviews as IMDbReviews
from scanl.data.published.forecasts import PublishedSeries as PublishedSeries
from scanl.data.published.images import Images as Images
from scanl.data.published.language import PublishedText as PublishedText
from scanl.data.published.music import PublishedPieces as PublishedPieces
from scanl.data.published.photographs import ImageNetPatches as ImageNetPatches
from scanl.data.published.pile import PileDocuments as PileDocuments
from scanl.data.published.timit import TIMITFrames as TIMITFrames
from scanl.data.published.translation import IWSLT14Pairs as IWSLT14Pairs
from scanl.data.published.videos import Skeletons as Skeletons
from scanl.data.questions import Question as Question
from scanl.data.series.table import Table as Table
from scanl.data.shards.dataset import ShardLoader as ShardLoader
from scanl.data.shards.dataset import Shards as Shards
from scanl.data.text.corpus import Corpus as Corpus
from scanl.data.text.corpus import read_corpus as read_corpus
from scanl.data.text.corpus import standard_library as standard_library
from scanl.data.text.sharded_text import ShardedText as ShardedText
from scanl.data.text.text import ContiguousStreams as ContiguousStreams
from scanl.data.text.text import Text as Text
from scanl.data.text.text import Windows as Windows


def __getattr__(name: str) -> Any:
    for known in sources.names():
        if (cls := sources.get(known)).__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    every = map(sources.get, sources.names())
    return sorted(cls.__name__ for cls in every if cls.__module__.startswith(f"{__name__}."))

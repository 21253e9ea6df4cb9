"""Training data: the protocol of a source, and sources of real data."""

from scanl.data.audio import SpeechCommands as SpeechCommands
from scanl.data.base import IGNORED as IGNORED
from scanl.data.base import LEVELS as LEVELS
from scanl.data.base import Exam as Exam
from scanl.data.base import Examples as Examples
from scanl.data.base import Question as Question
from scanl.data.base import Source as Source
from scanl.data.base import register as register
from scanl.data.base import sources as sources
from scanl.data.contours import LRAPathfinder as LRAPathfinder
from scanl.data.corpus import Corpus as Corpus
from scanl.data.corpus import read_corpus as read_corpus
from scanl.data.corpus import standard_library as standard_library
from scanl.data.documents import IMDbReviews as IMDbReviews
from scanl.data.folders import Folders as Folders
from scanl.data.forecasts import ETTh1 as ETTh1
from scanl.data.images import CIFAR10Images as CIFAR10Images
from scanl.data.images import MNISTImages as MNISTImages
from scanl.data.language import Enwik8 as Enwik8
from scanl.data.music import JSBChorales as JSBChorales
from scanl.data.recordings import ArchiveProblem as ArchiveProblem
from scanl.data.table import Table as Table
from scanl.data.text import Streams as Streams
from scanl.data.text import Text as Text
from scanl.data.text import Windows as Windows
from scanl.data.timit import TIMITFrames as TIMITFrames

"""Synthetic tasks: generators of examples whose chance level and best score are known."""

from scanl.data.text import Corpus as Corpus
from scanl.data.text import Streams as Streams
from scanl.data.text import Windows as Windows
from scanl.data.text import read_corpus as read_corpus
from scanl.data.text import standard_library as standard_library
from scanl.tasks.adding import Adding as Adding
from scanl.tasks.associative_recall import AssociativeRecall as AssociativeRecall
from scanl.tasks.base import IGNORED as IGNORED
from scanl.tasks.base import Examples as Examples
from scanl.tasks.base import FreshExamples as FreshExamples
from scanl.tasks.base import Task as Task
from scanl.tasks.base import build as build
from scanl.tasks.base import get as get
from scanl.tasks.base import names as names
from scanl.tasks.copying import Copying as Copying
from scanl.tasks.induction import Induction as Induction
from scanl.tasks.irregular import Irregular as Irregular
from scanl.tasks.mqar import MQAR as MQAR
from scanl.tasks.parity import Parity as Parity
from scanl.tasks.selective_copying import SelectiveCopying as SelectiveCopying

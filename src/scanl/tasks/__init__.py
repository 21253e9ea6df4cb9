"""Synthetic tasks: generators of examples whose chance level and best score are known."""

from scanl.data.base import sources
from scanl.tasks.adding import Adding as Adding
from scanl.tasks.associative_recall import AssociativeRecall as AssociativeRecall
from scanl.tasks.base import IGNORED as IGNORED
from scanl.tasks.base import Batch as Batch
from scanl.tasks.base import FreshExamples as FreshExamples
from scanl.tasks.base import Task as Task
from scanl.tasks.base import build as build
from scanl.tasks.base import get as get
from scanl.tasks.base import names as names
from scanl.tasks.bouncing import BouncingDigits as BouncingDigits
from scanl.tasks.capacity import Capacity as Capacity
from scanl.tasks.conditioning import TraceConditioning as TraceConditioning
from scanl.tasks.conditioning import TracePatterning as TracePatterning
from scanl.tasks.copy_online import CopyOnline as CopyOnline
from scanl.tasks.copy_vectors import CopyVectors as CopyVectors
from scanl.tasks.copying import Copying as Copying
from scanl.tasks.digits_stream import DigitsStream as DigitsStream
from scanl.tasks.formal_language import FormalLanguage as FormalLanguage
from scanl.tasks.induction import Induction as Induction
from scanl.tasks.irregular import Irregular as Irregular
from scanl.tasks.listops import ListOps as ListOps
from scanl.tasks.lorenz import Lorenz63 as Lorenz63
from scanl.tasks.lorenz import Lorenz96 as Lorenz96
from scanl.tasks.mackey_glass import MackeyGlass as MackeyGlass
from scanl.tasks.mackey_glass_regimes import MackeyGlassRegimes as MackeyGlassRegimes
from scanl.tasks.mqar import MQAR as MQAR
from scanl.tasks.parity import Parity as Parity
from scanl.tasks.pass_key import PassKey as PassKey
from scanl.tasks.pathfinder import Pathfinder as Pathfinder
from scanl.tasks.pathfinder import PathX as PathX
from scanl.tasks.pendulum import Pendulum as Pendulum
from scanl.tasks.phonebook import Phonebook as Phonebook
from scanl.tasks.segments import Segments as Segments
from scanl.tasks.selective_copying import SelectiveCopying as SelectiveCopying
from scanl.tasks.t_maze import TMaze as TMaze
from scanl.tasks.task_2b import Task2b as Task2b
from scanl.tasks.word_problem import WordProblem as WordProblem


def __dir__() -> list[str]:
    every = map(sources.get, sources.names())
    return sorted(cls.__name__ for cls in every if cls.__module__.startswith(f"{__name__}."))

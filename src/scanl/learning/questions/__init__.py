"""The model, answers, loss, scores and baselines of each question, one file each.

A file in this folder is found by itself. A question of one's own is registered with `@answers(CLASS)`.
"""

from scanl.learning.questions.base import Answerer as Answerer
from scanl.learning.questions.base import Answers as Answers
from scanl.learning.questions.base import Model as Model
from scanl.learning.questions.base import answerer as answerer
from scanl.learning.questions.base import answers as answers
from scanl.registry import import_all

import_all(__name__)

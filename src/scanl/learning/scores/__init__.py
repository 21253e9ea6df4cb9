"""Scores of answers, by name. A file in this folder is found by itself.

A score is a function of a question, outputs and targets, as the question's answers are. It returns the sum over all
answers, and how many there are. For a score that is no mean, the sum is a `Total`. It is registered with
`@score("name")`, and a question names it.
"""

from scanl.learning.scores.base import Score as Score
from scanl.learning.scores.base import Total as Total
from scanl.learning.scores.base import score as score
from scanl.learning.scores.base import scores as scores
from scanl.registry import import_all

import_all(__name__)

"""Learning from a stream: each sample is answered, scored and then learnt, in constant memory.

`Online` is a model with the methods of river's estimators, and `progressive` scores one on a stream. `Prequential` is
the loop inside. `Scores` imports river when it is first used.
"""

from typing import TYPE_CHECKING, Any

from scanl.learning.online.answers import AnswerClass as AnswerClass
from scanl.learning.online.answers import AnswerNumbers as AnswerNumbers
from scanl.learning.online.bank import Bank as Bank
from scanl.learning.online.learner import Learner as Learner
from scanl.learning.online.online import Online as Online
from scanl.learning.online.online import progressive as progressive
from scanl.learning.online.prequential import Prequential as Prequential

if TYPE_CHECKING:
    from scanl.learning.online.scores import Scores as Scores
else:

    def __getattr__(name: str) -> Any:
        if name != "Scores":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from scanl.learning.online.scores import Scores

        return Scores

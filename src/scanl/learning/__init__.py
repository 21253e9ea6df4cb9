"""Learning: algorithms, training runs, and evaluation.

`run.module`, `run.train` and `run.callbacks` import lightning; nothing imports them before a run starts.
"""

from typing import TYPE_CHECKING

from scanl.faces import touched

if TYPE_CHECKING:
    from scanl.learning.evaluation import bits_per_byte as bits_per_byte
    from scanl.learning.evaluation import score as score
    from scanl.learning.evaluation import spread as spread
    from scanl.learning.forecasting.forecasts import forecast as forecast
    from scanl.learning.online.online import Online as Online
    from scanl.learning.online.online import progressive as progressive
    from scanl.learning.predictions import predict as predict
    from scanl.learning.run.config import TrainConfig as TrainConfig
    from scanl.learning.run.config import build_model as build_model
    from scanl.learning.run.folder import RunFolder as RunFolder
    from scanl.learning.state_tuning import tune_state as tune_state

__getattr__, __dir__ = touched(__name__)

"""How parameters learn: backpropagation through time.

`bptt`, `train` and `callbacks` import lightning; nothing here imports them before a run starts.
"""

from scanl.learning.evaluation import bits_per_byte as bits_per_byte
from scanl.learning.evaluation import score as score
from scanl.learning.evaluation import spread as spread
from scanl.learning.run.config import TrainConfig as TrainConfig
from scanl.learning.run.config import build_model as build_model
from scanl.learning.run.folder import RunFolder as RunFolder

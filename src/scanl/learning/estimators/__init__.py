"""Estimators as scikit-learn has them. `scanl.learning.forecasting.frames` has a forecaster of frames.

This package imports scikit-learn: `pip install 'scanl[sklearn]'`. By default an estimator is `RandomFilters` with a
readout in closed form, whose choices the series decide that are left out one by one. A stack is trained in memory, with
the loss, the optimizer and the learning rates of `scanl train`. No folder is left.
"""

from scanl.faces import public
from scanl.learning.estimators.classifier import SeriesClassifier as SeriesClassifier
from scanl.learning.estimators.regressor import SeriesRegressor as SeriesRegressor

__dir__ = public(__name__)

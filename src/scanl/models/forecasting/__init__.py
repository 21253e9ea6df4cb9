"""A forecaster of series, and the maps it is made of."""

"""Forecasts: the choice of a forecaster by backtests, its parts, and forecasts of tables and frames."""

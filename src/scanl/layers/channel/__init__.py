"""Layers that mix features instead of time."""

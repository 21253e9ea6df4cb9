"""Readers of published files: one file a format, with the name that a layout gives it."""

"""Readers of published files: one file a format. `scanl.data.published.records` finds them by the names that layouts give."""

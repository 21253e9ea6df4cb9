"""State-space models and diagonal recurrences."""

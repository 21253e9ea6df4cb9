"""Published data sets: the records of the catalogue, their download, and one file for each set that needs code."""

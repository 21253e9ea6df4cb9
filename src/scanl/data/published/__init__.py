"""Published data sets: the records of the catalogue, their download, and one file for each set that needs code."""

from scanl.data.published.sources import add as add
from scanl.data.published.sources import kind as kind
from scanl.data.published.sources import published as published

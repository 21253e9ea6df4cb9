"""What models are tried on: readers of real data, and generators."""

from scanl.tasks.text import Corpus as Corpus
from scanl.tasks.text import Streams as Streams
from scanl.tasks.text import Windows as Windows
from scanl.tasks.text import read_corpus as read_corpus
from scanl.tasks.text import standard_library as standard_library

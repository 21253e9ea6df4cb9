"""What models learn from: the protocol of a source, and sources of real data."""

from scanl.data.text import Corpus as Corpus
from scanl.data.text import Streams as Streams
from scanl.data.text import Windows as Windows
from scanl.data.text import read_corpus as read_corpus
from scanl.data.text import standard_library as standard_library

"""Pictures and numbers of what a model remembers."""

from scanl.inspect.memory import decoded as decoded
from scanl.inspect.reconstruction import reconstructed as reconstructed
from scanl.inspect.reconstruction import save_reconstruction as save_reconstruction

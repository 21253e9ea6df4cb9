"""Pictures and numbers of what a model remembers, and of the orbits that it has."""

from scanl.inspect.cycles import Cycle as Cycle
from scanl.inspect.cycles import Regions as Regions
from scanl.inspect.cycles import cycles as cycles
from scanl.inspect.cycles import regions as regions
from scanl.inspect.memory import decoded as decoded
from scanl.inspect.reconstruction import reconstructed as reconstructed
from scanl.inspect.reconstruction import save_reconstruction as save_reconstruction

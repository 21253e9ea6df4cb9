"""Pictures and numbers of what a layer remembers: spectra, kernels, memory, gradients, orbits.

An inspector is a function from a layer, and what it reads, to an `Inspection`: its tensors, a few figures, the columns
of a file, and a picture.
"""

from scanl.faces import public
from scanl.inspect.base import Inspection as Inspection
from scanl.inspect.base import Inspector as Inspector
from scanl.inspect.base import inspector as inspector
from scanl.inspect.base import inspectors as inspectors
from scanl.inspect.base import readings as readings
from scanl.inspect.capacity import MemoryCapacity as MemoryCapacity
from scanl.inspect.capacity import decoded as decoded
from scanl.inspect.capacity import memory_capacity as memory_capacity
from scanl.inspect.cycles import Branch as Branch
from scanl.inspect.cycles import Cycle as Cycle
from scanl.inspect.cycles import Orbits as Orbits
from scanl.inspect.cycles import Regions as Regions
from scanl.inspect.cycles import branches as branches
from scanl.inspect.cycles import cycles as cycles
from scanl.inspect.cycles import orbits as orbits
from scanl.inspect.cycles import regions as regions
from scanl.inspect.eigenvalues import Eigenvalues as Eigenvalues
from scanl.inspect.eigenvalues import eigenvalues as eigenvalues
from scanl.inspect.gradients import GradientNorms as GradientNorms
from scanl.inspect.gradients import gradient_norms as gradient_norms
from scanl.inspect.impulse import ImpulseResponse as ImpulseResponse
from scanl.inspect.impulse import impulse_response as impulse_response
from scanl.inspect.lyapunov import LyapunovExponents as LyapunovExponents
from scanl.inspect.lyapunov import lyapunov_exponents as lyapunov_exponents
from scanl.inspect.memory import EffectiveMemory as EffectiveMemory
from scanl.inspect.memory import effective_memory as effective_memory
from scanl.inspect.mixing import MixingMatrix as MixingMatrix
from scanl.inspect.mixing import mixing_matrix as mixing_matrix
from scanl.inspect.norms import StateNorms as StateNorms
from scanl.inspect.norms import state_norms as state_norms
from scanl.inspect.picture import picture as picture
from scanl.inspect.picture import save_columns as save_columns
from scanl.inspect.picture import save_picture as save_picture
from scanl.inspect.reconstruction import Reconstruction as Reconstruction
from scanl.inspect.reconstruction import reconstruction as reconstruction

__dir__ = public(__name__)

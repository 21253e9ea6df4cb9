"""Models of transformers and torch. Patches run their modules on scanl's ops; formats read and write checkpoints.

Originals read the checkpoints of the programs of models' authors. `convert` makes a stream of a module of torch.
"""

from scanl.faces import public
from scanl.hub.accelerate import Report as Report
from scanl.hub.accelerate import accelerate as accelerate
from scanl.hub.accelerate import restore as restore
from scanl.hub.checkpoints import load as load
from scanl.hub.checkpoints import save as save
from scanl.hub.keras_weights import keras_weights as keras_weights
from scanl.hub.lora import lora_config as lora_config
from scanl.hub.quantizer import enable_quantized as enable_quantized
from scanl.hub.quantizer import quantize as quantize
from scanl.hub.sessions import CacheSession as CacheSession
from scanl.hub.streaming.convert import convert as convert
from scanl.hub.streaming.onnx_module import ONNXModule as ONNXModule
from scanl.hub.streaming.stream import StreamingModule as StreamingModule

__dir__ = public(__name__)

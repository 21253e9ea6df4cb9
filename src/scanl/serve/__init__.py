"""An endpoint that speaks the usual completions interface. `scanl serve` starts it.

`app` imports fastapi: `pip install 'scanl[serve]'`.
"""

from scanl.faces import public
from scanl.serve.engine import Engine as Engine
from scanl.serve.limits import Limits as Limits

__dir__ = public(__name__)

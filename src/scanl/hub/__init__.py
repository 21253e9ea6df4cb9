"""Other libraries' models: their modules made fast in place, their checkpoints in and out."""

from scanl.hub.accelerate import Report as Report
from scanl.hub.accelerate import accelerate as accelerate
from scanl.hub.accelerate import restore as restore
from scanl.hub.checkpoints import load as load
from scanl.hub.checkpoints import save as save

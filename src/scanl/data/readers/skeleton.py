"""The files .skeleton of NTU RGB+D: joints of bodies, frame by frame, as text."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files

JOINTS, BODIES = 25, 2


def positions(files: Files, path: Path, folder: str = "") -> NDArray[np.float32]:
    """Return the positions of the joints in metres, (t, 2, 25, 3), of the first two bodies of each frame.

    A file has the number of frames. Each frame has the number of bodies. Each body has a line of ten numbers, the
    number of joints, and for each joint a line of twelve numbers; the first three are its position. A missing
    position is 0.
    """
    try:
        lines = iter(path.read_text(encoding="ascii").splitlines())
        frames = np.zeros((int(next(lines)), BODIES, JOINTS, 3), np.float32)
        for frame in frames:
            for body in range(int(next(lines))):
                next(lines)
                joints = [next(lines).split()[:3] for _ in range(int(next(lines)))]
                if body < BODIES:
                    frame[body] = np.array(joints, np.float32)
    except StopIteration as error:
        raise files.damaged(path, "it ends before its last frame", folder) from error
    except (OSError, ValueError) as error:
        raise files.damaged(path, f"it is no skeleton of {JOINTS} joints: {error}", folder) from error
    if not len(frames):
        raise files.damaged(path, "it has no frame", folder)
    return frames

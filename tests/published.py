"""Small data sets in the published formats, and the options with which sources read them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scanl.data.files import folders

WRITERS: dict[str, Callable[[Path], None]] = {}
# With which a source reads the small files. Other options are the defaults.
OPTIONS: dict[str, dict[str, object]] = {
    "mnist": {"validation": 4},
    "fashion_mnist": {"validation": 4},
    "mnist_pixels": {"validation": 4},
    "cifar10": {"validation": 4},
    "cifar100": {"validation": 2},
    "cifar10_pixels": {"validation": 4},
    "noise_padded_cifar10": {"validation": 4},
    "imagenet64_pixels": {"validation": 2},
}


def writes(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(write: Callable[[Path], None]) -> Callable[[Path], None]:
        WRITERS[name] = write
        return write

    return add


def write_all(root: Path) -> None:
    """Write every data set below a folder."""
    for name in folders:
        (root / name).mkdir(parents=True)
        WRITERS[name](root / name)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).integers(0, 256, shape).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    """The IDX form: a big-endian magic number of the type (8) and the dimensions, the sizes, the bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


@writes("mnist")
def mnist(folder: Path) -> None:
    for part, count in (("train", 24), ("t10k", 10)):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(random(count, 28, 28)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx((np.arange(count) % 10).astype(np.uint8)))


@writes("fashion_mnist")
def fashion_mnist(folder: Path) -> None:
    mnist(folder)
    for path in list(folder.iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


@writes("cifar10")
def cifar10(folder: Path) -> None:
    from PIL import Image

    for name in (*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"):
        Image.fromarray(random(4, 1024, 3)).save(folder / name)
    (folder / "train_lables.json").write_text(json.dumps([i % 10 for i in range(20)]))
    (folder / "test_lables.json").write_text("[3, 8, 8, 0]")


@writes("cifar100")
def cifar100(folder: Path) -> None:
    (folder / "train.bin").write_bytes(random(8, 3074).__mod__(100).tobytes())
    (folder / "test.bin").write_bytes(random(3, 3074).__mod__(100).tobytes())


@writes("imagenet64")
def imagenet64(folder: Path) -> None:
    for name in (*(f"train_data_batch_{i}" for i in range(1, 11)), "val_data"):
        np.savez(folder / f"{name}.npz", data=random(1, 12288), labels=np.array([1]))

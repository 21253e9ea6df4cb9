"""Read checkpoints of transformers and of forecasters into models, and write language models back."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from scanl.errors import CheckpointError, ConfigError
from scanl.hub import forecasters, formats, originals
from scanl.hub.folders import folder_written_whole, locate, read_config
from scanl.hub.weights import Weights
from scanl.layers import Layer
from scanl.layers.parts.quantized import prepare, quantized_paths
from scanl.models import LanguageModel
from scanl.ops.products.quantized_linear import PackedWeight

CARRIED_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # files of the tokenizer and of the generation options
IGNORED_OPTIONS = (
    "training",
    "expand",
    "round_up_to_multiple_of",
)  # the last two are sizes, which shapes of weights tell
QUANTIZATION, METHOD = "quantization_config", "scanl"  # the entry of config.json for whole numbers, and whose they are
OWN_FILES = ("config.json", "model.safetensors.index.json")


def load(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> Any:
    """Read a checkpoint of transformers, or of the authors' program, into a model in evaluation mode.

    The model is a `LanguageModel`, or for a folder of granite-tsfm with model_type "flowstate" a
    `scanl.models.forecasting.flowstate.FlowState`, and for one of tirex-2 a `scanl.models.forecasting.tirex2.TiRex2`.
    The arguments and errors are those of `language_model`, which reads no other models.
    """
    source = locate(path_or_id, revision)
    if source.is_dir():
        config, described_by = read_config(source)
        if (reader := forecasters.reader(config)) is not None:
            weights = Weights(source, described_by=described_by.name)
            who = f"checkpoint: {described_by}"
            try:
                stored = reader(config, weights, who)
            except ConfigError as error:
                raise CheckpointError(f"{who}: {error}") from error
            return stored.read(weights, dtype, device)
    return _language_model(path_or_id, source, dtype, device, revision)


def language_model(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> LanguageModel:
    """Read a checkpoint of transformers, or of the authors' program, into a language model, in evaluation mode.

    No program that a file contains is run: what torch.save wrote is read with `weights_only=True`, and only where the
    authors' program writes it.

    path_or_id: a folder, or OWNER/NAME on the Hugging Face hub. RWKV's own checkpoints are one file.
    revision: revision of the hub's repository.
    dtype: dtype of the parameters; None keeps the dtypes of the file.

    Raises CheckpointError for weights that are missing, damaged or left over, and for options that scanl does not have.
    """
    return _language_model(path_or_id, locate(path_or_id, revision), dtype, device, revision)


def _language_model(
    path_or_id: str | os.PathLike[str],
    source: Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
    revision: str | None,
) -> LanguageModel:
    """source: the folder or file that was found."""
    quantized: dict[str, Any] = {}
    weights = None if source.is_dir() else Weights(source, described_by="the shape of the others")
    if weights is None:
        config, described_by = read_config(source)
        config, quantized = _without_quantization(config, described_by)
        layout = _layout_of(config, described_by)
    else:
        described_by, layout = source, _layout_of_file(weights)
        config = layout.described(weights)
    who = f"checkpoint: {described_by}"
    options = layout.read(config, who)
    try:
        arguments, sizes = layout.arguments(options), layout.sizes(options)
        if weights is None:
            if layout.pickled is not None:
                source = locate(path_or_id, revision, layout.pickled)
            weights = Weights(source, layout.pickled, described_by.name)
            for end, ends in layout.divided.items():
                weights.divide(end, ends)
        entry = layout.depth_entry
        sizes = {name: size for name, size in sizes.items() if name.removesuffix(".weight") not in quantized}
        weights.check_sizes(sizes, layout.begin_of_blocks(), options[entry], entry)
        model = layout.build(arguments)
        prepare(model, {ours: quantized[path] for ours, path in _modules(layout, model).items() if path in quantized})
    except ConfigError as error:
        raise CheckpointError(f"{who}: {error}") from error
    names = {name: layout.their_name(name) for name in model.state_dict()}
    turns = {name: layout.turn(name) for name in names}
    tied = {}
    if model.head is None and "embedding.weight" in names:
        tied[layout.their_name("head.weight")] = names["embedding.weight"]
    shapes = {names[name]: turns[name].shape(tuple(value.shape)) for name, value in model.state_dict().items()}
    integers = {names[name] for name, value in model.state_dict().items() if value.dtype == torch.int8}
    weights.check(shapes, {**dict.fromkeys(layout.ignored), **tied}, integers)
    tags = {name: vars(parameter) for name, parameter in model.named_parameters()}
    exempt = {f"{path}.{field}" for path in quantized_paths(model) for field in PackedWeight._fields}
    tensors = {
        name: turns[name].tensor(weights.read(stored, None if name in exempt else dtype, device))
        for name, stored in names.items()
    }
    model.load_state_dict(tensors, assign=True)
    for name, parameter in model.named_parameters():
        vars(parameter).update(tags[name])
    return model.eval()


def save(model: LanguageModel, path: str | os.PathLike[str], *, like: str | os.PathLike[str] | None = None) -> None:
    """Write the model as a checkpoint that transformers loads. The folder is written atomically.

    like: the checkpoint that the model came from. Its tokenizer and the other entries of its config.json are copied.
    Without it config.json has no token ids.

    Raises CheckpointError when the folder is not empty, or when transformers has no such model.
    """
    fmt, entries = _described(model)
    config = dict(fmt.new)
    if like is not None:
        like = locate(like)
        config, described_by = read_config(like)
        if _format_of(config, described_by) is not fmt:
            source = config["model_type"]
            raise CheckpointError(f"save: {like} is a {source}, expected a {fmt.name} because of the model")
    for key in ("torch_dtype", "transformers_version", QUANTIZATION):
        config.pop(key, None)
    if paths := quantized_paths(model):
        bits_by_path = {fmt.their_name(f"{path}.weight").removesuffix(".weight"): bits for path, bits in paths.items()}
        config[QUANTIZATION] = {"quant_method": METHOD, "modules": bits_by_path}
    config |= {"architectures": [fmt.architecture], "model_type": fmt.name, **entries}
    config["dtype"] = str(model.embedding.weight.dtype).removeprefix("torch.")
    tensors = {fmt.their_name(name): value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    with folder_written_whole(Path(path)) as folder:
        if like is not None:
            for source in {file for pattern in CARRIED_FILES for file in like.glob(pattern)}:
                if source.name not in OWN_FILES:
                    shutil.copyfile(source, folder / source.name)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _without_quantization(config: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options without what `save` wrote of whole numbers, and their bits by the paths of modules there."""
    about = config.get(QUANTIZATION)
    if not isinstance(about, dict) or about.get("quant_method") != METHOD:
        return config, {}
    bits = about.get("modules")
    if not isinstance(bits, dict):
        raise CheckpointError(f"checkpoint: {path}: {QUANTIZATION} has modules {bits!r}, expected bits by paths")
    return {key: value for key, value in config.items() if key != QUANTIZATION}, bits


def _modules(layout: type[formats.CheckpointLayout], model: LanguageModel) -> dict[str, str]:
    """Return the stored paths of the modules that have a weight, by ours."""
    ours = [name for name in model.state_dict() if name.endswith(".weight")]
    return {name.removesuffix(".weight"): layout.their_name(name).removesuffix(".weight") for name in ours}


def _format_of(config: Mapping[str, Any], path: Path, others: str = "") -> type[formats.Format]:
    """Return transformers' format of a folder with these options. others: what the error names beside the formats."""
    kind = config.get("model_type")
    if kind not in formats.names():
        known = ", ".join(formats.names())
        raise CheckpointError(f"checkpoint: {path}: model_type is {kind!r}, expected one of {known}{others}")
    return formats.get(kind)


def _layout_of(config: Mapping[str, Any], path: Path) -> type[formats.CheckpointLayout]:
    """Return the layout of a folder with these options."""
    layouts = list(map(originals.get, originals.names()))
    layout = next((layout for layout in layouts if layout.recognizes(config)), None)
    programs = ", ".join(dict.fromkeys(layout.program for layout in layouts))
    return layout or _format_of(config, path, f", or options of {programs}")


def _layout_of_file(weights: Weights) -> type[originals.ShapedFile]:
    """Return the layout of one file."""
    layouts = [layout for layout in map(originals.get, originals.names()) if issubclass(layout, originals.ShapedFile)]
    newest = next((layout for layout in reversed(layouts) if layout.mark in weights.names()), None)
    if newest is None:
        marks = ", ".join(layout.mark for layout in layouts)
        raise CheckpointError(f"checkpoint: {weights.source} is not of RWKV, expected one of the weights {marks}")
    return newest


def _described(model: LanguageModel) -> tuple[type[formats.Format], dict[str, Any]]:
    """Return the format for this model, and the entries of its config.json."""
    for fmt in map(formats.get, formats.names()):
        if fmt.holds(model):
            try:
                entries = fmt.entries(model)
                again = fmt.build(fmt.arguments(fmt.read(entries, "save")))
                prepare(again, quantized_paths(model))
            except ConfigError as error:
                raise CheckpointError(f"save: {error}") from error
            if _parts(again) != _parts(model):
                raise CheckpointError(
                    f"save: the model differs from {fmt.architecture} in its blocks or norms, expected "
                    f"the blocks and norms that scanl.hub.load makes for model_type {fmt.name}"
                )
            return fmt, entries
    channels = [block.channel for block in formats.blocks(model)]
    parts = (module for module in (*model.stack.mixers(), *channels) if module is not None)
    classes = " and ".join(dict.fromkeys(type(module).__name__ for module in parts))
    known = ", ".join(formats.names())
    raise CheckpointError(
        f"save: the model is built of {classes}, expected a model that transformers has: {known}; "
        "to save any model for scanl alone, call model.save"
    )


def _parts(model: LanguageModel) -> tuple[Any, ...]:
    """Return the parts of a model that decide its outputs: equal parts and weights give equal outputs."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    return [_options(module) for module in model.modules()], shapes, formats.in_float32(model)


def _options(module: nn.Module) -> tuple[type[nn.Module], Any]:
    """Return the class of a module, and its options; of a layer, its attributes that are numbers or text."""
    if not isinstance(module, Layer):
        return type(module), module.extra_repr()
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    return type(module), {
        name: value for name, value in plain.items() if name not in IGNORED_OPTIONS and name[0] != "_"
    }

"""TiRex-2 as its authors' program, tirex-2, writes it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scanl.errors import CheckpointError, unknown
from scanl.hub.forecasters.stored_model import StoredModel
from scanl.hub.weights import Weights
from scanl.models.forecasting.tirex2 import TiRex2
from scanl.whole import whole_number

MARK = "stack_config"  # an entry that the files of other programs lack
# Entries of config.json and of two objects in it, and the arguments of `TiRex2`. Those of the last three may be absent.
SIZES = {
    "embedding_dim": "dim", "input_patch_size": "patch", "context_len": "context", "future_len": "future",
    "input_ff_dim": "hidden_in",
}  # fmt: skip
OPTIONAL = {"use_qk_norm": "unit", "tta_diff": "differences", "tta_sign_flip": "flips"}
SCALER = {"eps": "least_scale", "use_arcsinh": "arcsinh", "binaryaware": "keeps_binary"}
SCALER_DEFAULTS = {"least_scale": 1e-8, "arcsinh": False, "keeps_binary": False}
NORM_EPS, HEADS = 1e-7, 4  # where they are absent
KINDS = {"bi-slstm": "slstm", "bi-mlstm": "mlstm"}
ACTIVATIONS = {"ReLU": "relu", "SiLU": "silu", "GELU": "gelu", "Tanh": "tanh"}
KERNEL, KERNEL_AXES = "._recurrent_kernel_", (2, 0, 3, 1)  # in the file (H, K, 4, K): inputs, gates, outputs
STACK, INPUT, OUTPUT = "stack.", "input_patch_embedding.", "output_patch_embedding."
# Parts of the names of tensors, and those that they may have in the file: both directions in time share one cell, whose
# kernel has two names.
PARTS = {
    "time_mixer.cell.": ("time_mixer.fwd_cell.", "time_mixer.rev_cell."),
    "_recurrent_kernel_": ("_recurrent_kernel_", "recurrent_kernel"),
    "ffn.gate.": ("ffn.proj_up_gate.",), "ffn.up.": ("ffn.proj_up.",), "ffn.down.": ("ffn.proj_down.",),
    "variate_mixer.wi.": ("variate_mixer.ffn.wi.",), "variate_mixer.wo.": ("variate_mixer.ffn.wo.",),
}  # fmt: skip


def model(config: Mapping[str, Any], weights: Weights, who: str) -> StoredModel:
    """Return a model of the sizes in config."""
    for key in (*SIZES, "num_blocks"):
        whole_number(who, key, _entry(who, config, key), 1)
    options: dict[str, Any] = {ours: config[key] for key, ours in SIZES.items()}
    options |= {ours: config[key] for key, ours in OPTIONAL.items() if key in config}
    scaler = _entry(who, config, "scaler_cfg", dict)
    options |= SCALER_DEFAULTS | {ours: scaler[key] for key, ours in SCALER.items() if key in scaler}
    sizes = {"output_patch_size": _entry(who, config, "output_patch_size")}
    tokenizer = _entry(who, config, "tokenizer_cfg", dict)
    sizes |= {key: _entry(who, tokenizer, key) for key in ("input_patch_size", "input_patch_stride")}
    for key, size in sizes.items():
        if size != options["patch"]:
            raise CheckpointError(f"{who}: {key} is {size!r}, expected {options['patch']} because of input_patch_size")
    activation = str(_entry(who, config, "act_func")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"{who}: {unknown('act_func', activation, ACTIVATIONS)}")
    norm = config.get("stack_out_norm_config")
    options |= {
        "activation": ACTIVATIONS[activation],
        "hidden_out": int(options["dim"] * _entry(who, config, "h_expand", float | int)),
        "quantiles": _entry(who, config, "quantiles", list),
        "norm_eps": norm if norm is None else _entry(who, config, "stack_out_norm_config", dict).get("eps", NORM_EPS),
    }
    blocks = list(_blocks(who, config, options["dim"]))
    options |= zip(("kinds", "heads", "attention_heads"), zip(*blocks, strict=True), strict=True)
    expected = {
        f"{INPUT}hidden_layer.weight": (options["hidden_in"], 2 * options["patch"]),
        f"{OUTPUT}hidden_layer.weight": (options["hidden_out"], options["dim"]),
        f"{OUTPUT}output_layer.weight": (len(options["quantiles"]) * options["patch"], options["hidden_out"]),
    }
    weights.check_sizes(expected, STACK, len(blocks), "num_blocks")
    made = TiRex2(**options)
    names = {name: _stored(name) for name in made.state_dict()}
    return StoredModel(made, names, {name: KERNEL_AXES for name in names if name.endswith(KERNEL)})


def _entry(who: str, entries: Mapping[str, Any], key: str, kind: Any = object) -> Any:
    if key not in entries:
        raise CheckpointError(f"{who}: {key} is absent, expected an entry of TiRex-2")
    if not isinstance(entries[key], kind):
        raise CheckpointError(f"{who}: {key} is {entries[key]!r}, expected a value of type {kind}")
    return entries[key]


def _blocks(who: str, config: Mapping[str, Any], dim: int) -> Iterator[tuple[str, int, int]]:
    """Yield the kind of each block, the heads of its xLSTM, and those of its attention."""
    stack = _entry(who, config, MARK, dict)
    templates, recipe = _entry(who, stack, "templates", dict), _entry(who, stack, "recipe", list)
    if len(recipe) != config["num_blocks"]:
        raise CheckpointError(f"{who}: recipe has {len(recipe)} blocks, expected {config['num_blocks']} by num_blocks")
    for name in recipe:
        template = _entry(who, templates, str(name), dict)
        time, variates = (_entry(who, template, key, dict) for key in ("time_mixer", "variate_mixer"))
        for mixer in (time, variates):
            if _entry(who, mixer, "embedding_dim") != dim:
                said = f"embedding_dim of {name} is {mixer['embedding_dim']!r}"
                raise CheckpointError(f"{who}: {said}, expected {dim} as that of the model")
        kind = _entry(who, time, "model_type", str)
        if kind not in KINDS:
            raise CheckpointError(f"{who}: {unknown('model_type', kind, KINDS)}")
        heads = time.get("num_heads", HEADS)
        if KINDS[kind] == "slstm" and time.get("num_slstm_heads") is not None:
            heads = time["num_slstm_heads"]
        attention = variates.get("num_heads", HEADS)
        yield KINDS[kind], whole_number(who, "num_heads", heads, 1), whole_number(who, "num_heads", attention, 1)


def _stored(name: str) -> Sequence[str]:
    names = [name]
    for ours, theirs in PARTS.items():
        names = [each.replace(ours, other) for each in names for other in (theirs if ours in each else [ours])]
    return names

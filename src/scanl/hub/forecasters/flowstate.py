"""FlowState as granite-tsfm writes it."""

from collections.abc import Mapping
from typing import Any

from scanl.errors import CheckpointError
from scanl.hub.forecasters.stored_model import StoredModel
from scanl.hub.weights import Weights
from scanl.models.forecasting.flowstate import FlowState
from scanl.whole import whole_number

# Entries of config.json, and the arguments of `FlowState`. Those of the second table may be absent.
ENTRIES = {
    "embedding_feature_dim": "dim", "encoder_num_layers": "depth", "encoder_state_dim": "modes",
    "decoder_patch_len": "patch", "decoder_dim": "functions", "decoder_type": "basis", "quantiles": "quantiles",
}  # fmt: skip
SIZES = ("embedding_feature_dim", "encoder_num_layers", "encoder_state_dim", "decoder_patch_len", "decoder_dim")
OPTIONAL = {"out_gating": "gated", "mlp_type": "mlp", "prediction_type": "mean", "scale_factor": "scale"}
OLD_MEAN = "quantile"  # of prediction_type; granite-tsfm reads it as "mean"
BLOCKS = "model.encoder.layers."
PREFIXES = {"embed.": "model.embed.embed.", "blocks.": BLOCKS, "readout.": "model.decoder.lin."}


def model(config: Mapping[str, Any], weights: Weights, who: str) -> StoredModel:
    """Return a model of the sizes in config."""
    for key in ENTRIES:
        if key not in config:
            raise CheckpointError(f"{who}: {key} is absent, expected an entry of FlowState")
    if config.get("with_missing", True) is not True:
        raise CheckpointError(f"{who}: with_missing is {config['with_missing']!r}, expected true")
    for key in SIZES:
        whole_number(who, key, config[key], 1)
    if not isinstance(config["quantiles"], list):
        raise CheckpointError(f"{who}: quantiles is {config['quantiles']!r}, expected a list of levels")
    options = {ours: config[key] for key, ours in ENTRIES.items()}
    options |= {ours: config[key] for key, ours in OPTIONAL.items() if key in config}
    if options.get("mean") == OLD_MEAN:
        options["mean"] = "mean"
    dim, modes = options["dim"], options["modes"]
    sizes = {
        "model.embed.embed.weight": (dim, 2), f"{BLOCKS}0.ssm.B_tilde_r": (modes, dim),
        "model.decoder.lin.weight": (options["functions"] * len(options["quantiles"]), dim),
    }  # fmt: skip
    weights.check_sizes(sizes, BLOCKS, options["depth"], "encoder_num_layers")
    made = FlowState(**options)
    return StoredModel(made, {name: [_stored(name)] for name in made.state_dict()})


def _stored(name: str) -> str:
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    return PREFIXES[prefix] + name.removeprefix(prefix)

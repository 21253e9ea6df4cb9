"""Make the checkpoints of tests/hub/forecasters and their forecasts anew, by the programs of the models' authors.

    python tests/hub/make_forecasters.py

It needs PyPI's granite-tsfm, whose package imports all its models; so its files of FlowState alone are imported. The
files there were made with granite-tsfm 0.3.11 and transformers 5.23.0. Weights are random, and numbers of bfloat16.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

OUT = Path(__file__).with_name("forecasters")
HORIZONS = (3, 30)
FLOWSTATES: dict[str, dict[str, Any]] = {
    "flowstate": {"decoder_type": "legs", "decoder_dim": 8},
    "flowstate_gated": {
        "decoder_type": "four", "decoder_dim": 9, "out_gating": True, "mlp_type": "transformer", "scale_factor": 2.0,
        "prediction_type": "median",
    },
}  # fmt: skip


def flowstate(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Write a checkpoint, and return a series with its quantiles and means."""
    from tsfm_public.models.flowstate.configuration_flowstate import FlowStateConfig
    from tsfm_public.models.flowstate.modeling_flowstate import FlowStateForPrediction

    torch.manual_seed(0)
    sizes = {
        "embedding_feature_dim": 8, "encoder_num_layers": 2, "encoder_state_dim": 8, "encoder_num_hippo_blocks": 2,
        "decoder_patch_len": 8,
    }  # fmt: skip
    model = FlowStateForPrediction(FlowStateConfig(**sizes, **options)).eval()
    for weight in model.parameters():
        weight.copy_((weight + 0.1 * torch.randn(weight.shape)).bfloat16())
    model.save_pretrained(OUT / name)
    series = (3 + torch.randn(2, 40, 1).cumsum(1)).round(decimals=3)
    series[0, 5:9] = torch.nan
    answers = {}
    for horizon in HORIZONS:
        said = model(past_values=series.clone(), prediction_length=horizon)
        found = {"quantiles": said.quantile_outputs, "mean": said.prediction_outputs}
        answers[horizon] = {key: values[..., 0].tolist() for key, values in found.items()}
    rows = [[None if value != value else value for value in row] for row in series[..., 0].tolist()]
    return {"series": rows, "answers": answers}


def main() -> None:
    spec = importlib.util.find_spec("tsfm_public")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for part in ("", ".models", ".models.flowstate"):
        module = ModuleType(f"tsfm_public{part}")
        module.__path__ = [spec.submodule_search_locations[0] + part.replace(".", "/")]
        sys.modules[module.__name__] = module
    with torch.no_grad():
        said = {name: flowstate(name, options) for name, options in FLOWSTATES.items()}
    (OUT / "forecasts.json").write_text(json.dumps(said) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Make the checkpoints of tests/hub/forecasters and their forecasts anew, by the programs of the models' authors.

    python tests/hub/make_forecasters.py

It needs PyPI's granite-tsfm, whose package imports all its models; so its files of FlowState alone are imported. It
needs tirex-2 too. The files there were made with granite-tsfm 0.3.11, transformers 5.23.0, tirex-2 0.4.0, flashrnn
1.0.8 and mlstm_kernels 2.0.6. Weights are random, and numbers of bfloat16.
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

TIREX2: dict[str, Any] = {
    "num_blocks": 2, "embedding_dim": 8, "input_patch_size": 8, "output_patch_size": 8, "context_len": 30,
    "future_len": 16, "input_ff_dim": 8, "h_expand": 1.5, "act_func": "torch.nn.ReLU", "dropout": 0.0,
    "quantiles": [0.1, 0.5, 0.9], "scaler_cfg": {"eps": 1e-8, "use_arcsinh": True, "binaryaware": True},
    "tokenizer_cfg": {"input_patch_size": 8, "output_patch_size": 8, "input_patch_stride": 8},
    "stack_out_norm_config": {"eps": 1e-6, "use_rmsnorm": True},
    "stack_config": {
        "recipe": ["s", "m"],
        "templates": {
            name: {
                "time_mixer": {"model_type": kind, "embedding_dim": 8, "num_heads": 2, "num_slstm_heads": 4},
                "variate_mixer": {"embedding_dim": 8, "num_heads": 2}, "dropout": 0.0, "eps": 1e-6,
            }
            for name, kind in (("s", "bi-slstm"), ("m", "bi-mlstm"))
        },
    },
}  # fmt: skip
# Of each case: the entries of config.json that differ, rows, targets, past and known covariates, steps, steps ahead.
CASES: list[tuple[dict[str, Any], int, int, int, int, int, int]] = [
    ({}, 2, 2, 1, 0, 37, 11), ({"tta_sign_flip": True, "stack_out_norm_config": {}}, 1, 1, 0, 0, 5, 16),
    ({"tta_sign_flip": True}, 1, 1, 1, 2, 21, 13),
]  # fmt: skip
PIECES = [19, 16, 8]  # steps of the pieces of a stream


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


def tirex2() -> list[dict[str, Any]]:
    """Write a checkpoint, and return series with their quantiles."""
    from safetensors.torch import save_file
    from tirex2 import TimeseriesType
    from tirex2._state_dict import shared_tensor_groups
    from tirex2.model import TiRex2

    def made(entries: dict[str, Any]) -> Any:
        model = TiRex2(**TIREX2 | entries, device="cpu").eval()
        model.load_state_dict(weights)
        return model

    def quantiles(model: Any, x: torch.Tensor, known: torch.Tensor, targets: int, ahead: int) -> torch.Tensor:
        parts = [x[..., :targets], x[..., targets:], known]
        columns = ([part[row].T if part.shape[2] else None for part in parts] for row in range(len(x)))
        return torch.stack(model.predict([TimeseriesType(*each) for each in columns], ahead)).permute(0, 3, 1, 2)

    def case(x: torch.Tensor, known: torch.Tensor, said: list[torch.Tensor], **others: Any) -> dict[str, Any]:
        lists = {name: torch.where(part.isnan(), 1e9, part).tolist() for name, part in (("x", x), ("known", known))}
        return {**others, **lists, "quantiles": [each.tolist() for each in said]}

    torch.manual_seed(0)
    model = TiRex2(**TIREX2, device="cpu")
    for weight in model.parameters():
        weight.copy_((weight + 0.2 * torch.randn(weight.shape)).bfloat16())
    weights = model.state_dict()
    aliases = {name for group in shared_tensor_groups(model) for name in group[1:]}
    (OUT / "tirex2").mkdir(exist_ok=True)
    (OUT / "tirex2" / "config.json").write_text(json.dumps(TIREX2) + "\n", encoding="utf-8")
    kept = {name: weight.bfloat16() for name, weight in weights.items() if name not in aliases}
    save_file(kept, OUT / "tirex2" / "model.safetensors")
    found = []
    for entries, rows, targets, past, future, steps, ahead in CASES:
        x = (3 + torch.randn(rows, steps, targets + past).cumsum(1)).round(decimals=3)
        x[0, 2:4, 0] = torch.nan
        x[-1, :, 0] += 3 * torch.arange(steps)
        if past:
            x[..., -1] = (x[..., -1] > 3).float()
        known = torch.randn(rows, steps + ahead, future).round(decimals=3)
        known[:, steps:, 1:] = torch.nan
        said = [quantiles(made(entries), x, known, targets, ahead)]
        found.append(case(x, known, said, entries=entries, targets=targets, ahead=ahead, pieces=[steps]))
    # A stream: later pieces are normalised, and differenced, as the first one was, and nothing is forgotten.
    x = torch.randn(1, sum(PIECES), 2).cumsum(1)
    x[..., 0] += 2 * torch.arange(sum(PIECES))
    x, known, model, first = x.round(decimals=3), torch.zeros(1, 0, 0), made({}), {}
    detect, scale = model.postprocessor._detect_trends, model.scaler.scale
    model.postprocessor._detect_trends = lambda rows: first.setdefault("trends", detect(rows))
    model.scaler.scale = lambda rows: scaled(rows, *first.setdefault("about", scale(rows)[1]))
    said = []
    for count in range(1, len(PIECES) + 1):
        model.context_len = TIREX2["context_len"] + sum(PIECES[1:count])
        said.append(quantiles(model, x[:, : sum(PIECES[:count])], known, 2, 12))
    return [*found, case(x, known, said, entries={}, targets=2, ahead=12, pieces=PIECES)]


def scaled(rows: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, binary: torch.Tensor) -> Any:
    """Return what the authors' scaler does, with a mean and a deviation that are given."""
    assert not binary.any()
    return ((rows - mean) / deviation).arcsinh(), (mean, deviation, binary)


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
        (OUT / "tirex2.json").write_text(json.dumps(tirex2()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

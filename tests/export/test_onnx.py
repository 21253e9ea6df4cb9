"""Files of ONNX: run by onnxruntime in pieces and in steps, against the models."""

import json
import sys

import numpy as np
import pytest
import torch

from scanl.errors import ConfigError
from scanl.export import start_state, write_onnx
from scanl.layers import build
from scanl.models import Forecaster, LanguageModel, Stack

COVERS = ["export/native"]


def test_onnxruntime_reads_pieces_and_steps(tmp_path):
    """Each operator that a recurrence can become, in one model, for a batch and lengths that the export did not see."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'scanl[export]'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.manual_seed(0)
    options = {"gated_deltanet": {"num_heads": 2}, "gla": {"num_heads": 2}}
    model = LanguageModel(9, Stack(8, 3, ["gated_deltanet", "gla", "lstm"], layer_options=options))
    write_onnx(model, tmp_path / "model.onnx")
    assert model.training
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (metadata,) = session.get_modelmeta().custom_metadata_map.values()
    state, tokens, outputs = start_state(metadata, 3), torch.randint(9, (3, 12)), []
    for piece in tokens.split([7, 3, 1, 1], 1):
        y, *last = session.run(None, {"x": piece.numpy(), **state})
        state = dict(zip(state, last, strict=True))
        outputs.append(y)
    with torch.no_grad():
        expected, _ = model.eval()(tokens)
    y = np.concatenate(outputs, 1)
    assert np.linalg.norm(y - expected.numpy()) <= 1e-5 * expected.norm().item()
    nodes = {node.op_type for node in sys.modules["onnx"].load(tmp_path / "model.onnx").graph.node}
    assert nodes >= {"LinearAttention", "CausalConvWithState", "Scan"}


def test_the_first_state_comes_from_the_file():
    model = Forecaster(2, Stack(4, 1, "lru"))
    from scanl.export.flat import Flat
    from scanl.export.onnx import described

    flat = Flat(model)
    metadata = json.dumps({leaf.name: described(leaf.start) for leaf in flat.leaves})
    state = start_state(metadata, 3)
    assert list(state) == [leaf.name for leaf in flat.leaves]
    for value, expected in zip(state.values(), flat.start(3), strict=True):
        np.testing.assert_array_equal(value, expected.numpy(), strict=True)


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"expected a file of \.onnx"):
        write_onnx(build("gru", 4), tmp_path / "model.pb")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"needs onnx and onnxscript: pip install 'scanl\[export\]'"):
        write_onnx(build("gru", 4), tmp_path / "model.onnx")

"""Files of ONNX: run by onnxruntime in pieces and in steps, against the models."""

import errno
import json
import sys

import numpy as np
import pytest
import torch

from scanl.errors import CheckpointError, ConfigError
from scanl.export import native, start_state, write_onnx, write_package
from scanl.export.flat import FlatModel
from scanl.export.lowering import LoweredCall
from scanl.export.onnx import described
from scanl.files import files_written_whole
from scanl.layers import build
from scanl.models import Forecaster, LanguageModel, Stack, pretrained_forecaster
from scanl.models.forecasting.pretrained_step import PretrainedStep
from scanl.ops import delta_rule, linear_attention, short_convolution

COVERS = ["export/native"]


def test_onnxruntime_reads_pieces_and_steps(tmp_path):
    """Each operator that a recurrence can become, in one model, for a batch and lengths that the export did not see."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'scanl[export]'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.manual_seed(0)
    options = {"gated_deltanet": {"num_heads": 2}, "gla": {"num_heads": 2}}
    model = LanguageModel(9, Stack(8, 4, ["gated_deltanet", "gla", "lstm", "lru"], layer_options=options))
    write_onnx(model, tmp_path / "model.onnx", opset=27)
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


def test_the_pretrained_forecaster_steps_in_onnxruntime(tmp_path):
    """Rows of a batch that the export did not see; one of them begins late, and one has a gap."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'scanl[export]'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, levels = pretrained_forecaster(), (0.1, 0.5, 0.9)
    write_onnx(PretrainedStep(model, 2, (3, 6), levels), tmp_path / "f.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "f.onnx", providers=["CPUExecutionProvider"])
    state = start_state(session.get_modelmeta().custom_metadata_map["state"], 3)
    x, answers = np.random.default_rng(0).normal(size=(3, 24)).cumsum(1), []
    x[0, :3] = x[1, 8:11] = np.nan
    for column in x.T:
        y, *last = session.run(None, {"x": column[:, None, None], **state})
        state = dict(zip(state, last, strict=True))
        answers.append(y[:, 0])
    expected, _ = model.each(x, model.init_state(3, season=(3, 6)), np.arange(24), horizon=2, levels=levels)
    np.testing.assert_allclose(np.stack(answers, 1), expected, rtol=1e-5, atol=1e-5)


def test_the_first_state_comes_from_the_file():
    model = Forecaster(2, Stack(4, 1, "lru"))
    flat = FlatModel(model)
    metadata = json.dumps({leaf.name: described(leaf.start) for leaf in flat.leaves})
    state = start_state(metadata, 3)
    assert list(state) == [leaf.name for leaf in flat.leaves]
    for value, expected in zip(state.values(), flat.start(3), strict=True):
        np.testing.assert_array_equal(value, expected.numpy(), strict=True)


def test_numbers_that_are_not_finite_are_texts():
    inf = float("inf")
    for start in (torch.full((1, 2), -inf), torch.tensor([[inf, 0.5, -inf, float("nan")]])):
        metadata = json.dumps({"state": described(start)}, allow_nan=False)
        np.testing.assert_array_equal(start_state(metadata, 2)["state"], start.repeat(2, 1).numpy(), strict=True)


def test_files_are_written_whole_or_not_at_all(tmp_path):
    """The weights of a large model are in a file beside it; a full disk leaves both as they were."""
    path, data = tmp_path / "model.onnx", tmp_path / "model.onnx.data"

    def write(content):
        with files_written_whole(path) as partial:
            partial.with_name(data.name).write_text(content)
            if content == "too long":
                raise OSError(errno.ENOSPC, "No space left on device")
            partial.write_text(content)

    write("short")
    with pytest.raises(CheckpointError, match=r"model.onnx cannot be written: No space left on device"):
        write("too long")
    assert {file: file.read_text() for file in tmp_path.iterdir()} == {path: "short", data: "short"}


@pytest.mark.parametrize("write", [write_onnx, write_package])
def test_a_full_disk_leaves_the_file_before(write, tmp_path, monkeypatch):
    if write is write_onnx:
        for package in ("onnx", "onnxscript"):
            pytest.importorskip(package, reason=f"{package} is not installed: pip install 'scanl[export]'")
    path = tmp_path / ("model.onnx" if write is write_onnx else "model.pt2")
    path.write_text("the model before")

    def cut(*_, package_path=None, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if write is write_package:
        monkeypatch.setattr("torch._inductor.aoti_compile_and_package", cut)
    else:
        monkeypatch.setattr("torch.onnx.ONNXProgram.save", cut)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        write(build("gru", 4), path)
    assert path.read_text() == "the model before"
    assert list(tmp_path.iterdir()) == [path]


def operator(name, inputs, attributes, like):
    """The equations of LinearAttention and CausalConvWithState, as ONNX has them, step by step."""
    if name == "CausalConvWithState":
        x, weight, bias, state = inputs
        window = torch.cat([state, x], -1)
        y = torch.nn.functional.conv1d(window, weight, bias, groups=x.shape[1])
        return y * y.sigmoid() if attributes["activation"] == "silu" else y, window[..., x.shape[-1] :]
    q, k, v = (x.unflatten(-1, (attributes["q_num_heads"], -1)) for x in inputs[:3])
    state, g, beta = inputs[3:]
    assert (g is not None) == attributes["update_rule"].startswith("gated")
    ys = []
    for t in range(q.shape[1]):
        if g is not None:
            state = g[:, t].unflatten(-1, (q.shape[2], -1)).exp()[..., None] * state
        new = v[:, t]
        if attributes["update_rule"].endswith("delta"):
            new = beta[:, t, :, None] * (new - (k[:, t, :, None] @ state)[:, :, 0])
        state = state + k[:, t, :, :, None] * new[:, :, None]
        ys.append(attributes["scale"] * (q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(ys, 1).flatten(2), state


def test_what_an_operator_gets_computes_the_op(monkeypatch):
    """Also with fewer heads of queries and keys, other widths of values, and decays of any axes."""
    monkeypatch.setattr(native, "_operator", operator)
    q, k, v = (torch.randn(2, 5, heads, width) for heads, width in ((2, 3), (2, 3), (4, 6)))
    state, beta, x = torch.randn(2, 4, 3, 6), torch.rand(2, 5, 4), torch.randn(2, 5, 3)
    decays = [None, -torch.rand(2, 5, 4), -torch.rand(2, 5, 4, 3), -torch.rand(4)]
    scales = [{"scale": None}, {"scale": 0.3}]
    norms = [{"normalize_keys": False, "eps": 1e-6}, {"normalize_keys": True, "eps": 0.5}]
    window = {"x": x, "w": torch.randn(3, 4)}, {"x": x, "w": torch.randn(3, 4), "bias": torch.randn(3)}
    calls = [(linear_attention, {"q": q, "k": k, "v": v, "g": g}, state, scale) for g in decays for scale in scales]
    calls += [(delta_rule, {"q": q, "k": k, "v": v, "beta": beta, "g": g}, state, scale | norm)
              for g in decays[:3] for scale, norm in zip(scales, norms, strict=True)]  # fmt: skip
    calls += [(short_convolution, each, torch.randn(2, 3, 3), {"silu": silu}) for each in window for silu in (0, 1)]
    for op, operands, start, options in calls:
        operands = {name: value for name, value in operands.items() if value is not None}
        ours = native.NATIVE[op.name](LoweredCall(op, operands, start, options))
        for mine, expected in zip(ours, op(**operands, state=start, **options, backend="reference"), strict=True):
            torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(
    "start", [torch.tensor([[1.5, -2.0]]), torch.full((1, 2), 7), torch.zeros(1, 0), torch.eye(2)[None]]
)
def test_any_numbers_may_be_the_first_state(start):
    (value,) = start_state(json.dumps({"state": described(start)}), 3).values()
    np.testing.assert_array_equal(value, start.expand(3, *start.shape[1:]).numpy(), strict=True)


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"expected a file of \.onnx"):
        write_onnx(build("gru", 4), tmp_path / "model.pb")
    with pytest.raises(ConfigError, match="opset is 26, expected 25 or 27"):
        write_onnx(build("gru", 4), tmp_path / "model.onnx", opset=26)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"needs onnx and onnxscript: pip install 'scanl\[export\]'"):
        write_onnx(build("gru", 4), tmp_path / "model.onnx")

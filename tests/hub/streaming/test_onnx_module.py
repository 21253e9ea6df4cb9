"""Recurrent ONNX files as streams: against onnxruntime, trained further, and by name where they have none."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from scanl.errors import ConfigError
from scanl.export import write_onnx
from scanl.hub import ONNXModule, convert

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

HIDDEN, BATCH = 5, 2


def written(path, nodes, weights, inputs, *outputs):
    """Write a file. inputs: names and shapes."""
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "graph", values, results, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


def recurrence(kind, rows, numbers, **attributes):
    """Return nodes and weights of a file: a causal convolution of (B, 3, T), a recurrence of (T, B, 4), and a map."""

    def draw(*shape):
        return numbers.normal(size=shape).astype(np.float32) / 2

    weights = {
        "w": draw(4, 3, 3), "b": draw(4), "wi": draw(1, rows * HIDDEN, 4), "wh": draw(1, rows * HIDDEN, HIDDEN),
        "bias": draw(1, 2 * rows * HIDDEN), "out": draw(HIDDEN, 2), "one": np.array([1]),
    }  # fmt: skip
    states = ["h", "c"] if kind == "LSTM" else ["h"]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["conv"], pads=[2, 0], kernel_shape=[3]),
        helper.make_node("Relu", ["conv"], ["relu"]),
        helper.make_node("Transpose", ["relu"], ["steps"], perm=[2, 0, 1]),
        helper.make_node(
            kind, ["steps", "wi", "wh", "bias", "", *states], ["ys", "hn"], hidden_size=HIDDEN, **attributes
        ),
        helper.make_node("Squeeze", ["ys", "one"], ["y"]),
        helper.make_node("MatMul", ["y", "out"], ["z"]),
        helper.make_node("Transpose", ["z"], ["result"], perm=[1, 2, 0]),
    ]
    return nodes, weights, {"x": ["batch", 3, "steps"], **{name: [1, "batch", HIDDEN] for name in states}}


@pytest.mark.parametrize(
    ("kind", "rows", "attributes"),
    [("LSTM", 4, {}), ("GRU", 3, {"linear_before_reset": 1}), ("RNN", 1, {}), ("RNN", 1, {"activations": ["Relu"]})],
)
def test_a_file_is_a_stream(tmp_path, kind, rows, attributes):
    nodes, weights, inputs = recurrence(kind, rows, np.random.default_rng(0), **attributes)
    path = written(tmp_path / "model.onnx", nodes, weights, inputs, "result")
    x = torch.randn(BATCH, 3, 20)
    zeros = {name: np.zeros((1, BATCH, HIDDEN), np.float32) for name in inputs if name != "x"}
    (wanted,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy(), **zeros})
    stream = convert(path)
    ys, state = [], None
    for start, end in pairwise([0, 1, 9, 20]):
        y, state = stream(x[..., start:end], state)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 2).detach(), torch.from_numpy(wanted))
    assert all(parameter.grad is None for parameter in stream.parameters())
    torch.cat(ys, 2).square().sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in stream.parameters())
    write_onnx(stream, tmp_path / "again.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "again.onnx")
    first = {f"state.{name}": part.detach().numpy() for name, part in stream.init_state(BATCH).items()}
    np.testing.assert_allclose(session.run(["y"], {"x": x.numpy(), **first})[0], wanted, rtol=1e-5, atol=1e-5)


class Composed(torch.nn.Module):
    """Two inputs of a file in one row, and its results in one."""

    def __init__(self, path):
        super().__init__()
        self.file = ONNXModule(path)

    def forward(self, x):
        y, z = self.file(x[..., :4], x[..., 4:].unflatten(-1, (2, 3)).transpose(1, 2))
        return torch.cat([y, z.transpose(1, 2).flatten(2)], -1)


def test_a_file_of_several_inputs_is_a_part_of_a_module(tmp_path):
    """Its first states are zeros that it makes, or a part of an input; last states are no results."""
    draw = np.random.default_rng(0)
    weights = {
        "wi": draw.normal(size=(1, 3 * HIDDEN, 4)), "wh": draw.normal(size=(1, 3 * HIDDEN, HIDDEN)) / 3,
        "wl": draw.normal(size=(1, 4 * HIDDEN, HIDDEN)) / 3, "nought": 0.0,
        "map": draw.normal(size=(2, 3, 2)), "wt": draw.normal(size=(2, 3, 1, 3)),
    }  # fmt: skip
    weights = {name: np.asarray(value, np.float32) for name, value in weights.items()}
    weights |= {"one": [1], "two": [2], "zero": 0, "first": [0], "width": [HIDDEN], "groups": [0, 0, 2, 3]}
    nodes = [
        helper.make_node("Transpose", ["a"], ["steps"], perm=[1, 0, 2]),
        helper.make_node("Slice", ["s", "first", "one", "first"], ["h"]),
        helper.make_node("GRU", ["steps", "wi", "wh", "", "", "h"], ["ys"], hidden_size=HIDDEN, linear_before_reset=1),
        helper.make_node("Squeeze", ["ys", "one"], ["once"]),
        helper.make_node("Shape", ["once"], ["rows"], start=1, end=2),
        helper.make_node("Concat", ["one", "rows", "width"], ["of_state"], axis=0),
        helper.make_node("ConstantOfShape", ["of_state"], ["zeros"]),
        helper.make_node("Expand", ["nought", "of_state"], ["more_zeros"]),
        helper.make_node("Constant", [], ["wl2"], value=numpy_helper.from_array(weights["wl"])),
        helper.make_node(
            "LSTM", ["once", "wl2", "wl", "", "", "zeros", "more_zeros"], ["zs", "last"], hidden_size=HIDDEN
        ),
        helper.make_node("Shape", ["zs"], ["sizes"]),
        helper.make_node("Slice", ["sizes", "first", "one"], ["count"]),
        helper.make_node("Mul", ["one", "width"], ["wide"]),
        helper.make_node("Concat", ["count", "rows", "wide"], ["of_steps"], axis=0),
        helper.make_node("Mul", ["of_steps", "one"], ["of_result"]),
        helper.make_node("Reshape", ["zs", "of_result"], ["twice"]),
        helper.make_node("Transpose", ["twice"], ["y"], perm=[1, 0, 2]),
        helper.make_node("Einsum", ["b", "map"], ["mapped"], equation="bgti,gih->bgth"),
        helper.make_node("Gather", ["b", "zero"], ["left"], axis=3),
        helper.make_node("Unsqueeze", ["left", "three"], ["kept"]),
        helper.make_node("Mul", ["mapped", "kept"], ["scaled"]),
        helper.make_node(
            "ConvTranspose", ["scaled", "wt"], ["z"], strides=[1, 2], pads=[0, 1, 0, 1], output_padding=[0, 1]
        ),
    ]
    inputs = {"a": ["batch", "steps", 4], "b": ["batch", 2, "steps", 3], "s": [2, "batch", HIDDEN]}
    path = written(tmp_path / "model.onnx", nodes, weights | {"three": [3]}, inputs, "y", "z", "last")
    module = Composed(path)
    x, cut = torch.randn(BATCH, 12, 10), 5
    a, b = x[..., :4], x[..., 4:].unflatten(-1, (2, 3)).transpose(1, 2).contiguous()
    given = {"a": a.numpy(), "b": b.numpy(), "s": np.zeros((2, BATCH, HIDDEN), np.float32)}
    y, z, _ = map(torch.from_numpy, onnxruntime.InferenceSession(path).run(None, given))
    stream = convert(module, x)
    first, state = stream(x[:, :cut])
    rest, _ = stream(x[:, cut:], state)
    wanted = torch.cat([y, z.transpose(1, 2).flatten(2)], -1)
    torch.testing.assert_close(torch.cat([first, rest], 1).detach(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match=r"the file has the inputs \['a', 'b'\], expected 1"):
        convert(path)


def scan(**attributes):
    """Return nodes, weights and inputs of a file with a loop: h = tanh(h @ w + x), whose results are h and 2 h."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["h", "w"], ["of_h"]), helper.make_node("Add", ["of_h", "x_t"], ["sum"]),
            helper.make_node("Tanh", ["sum"], ["h_next"]), helper.make_node("Mul", ["h_next", "two"], ["y_t"]),
        ],
        "body", [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("h", "x_t")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("h_next", "y_t")],
        [numpy_helper.from_array(np.float32(2), "two")],
    )  # fmt: skip
    loop = helper.make_node("Scan", ["h0", "x"], ["last", "y"], body=body, num_scan_inputs=1, **attributes)
    weights = {"w": np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)}
    return [loop], weights, {"x": ["batch", "steps", 3], "h0": ["batch", 3]}


def test_a_scan_is_a_loop(tmp_path):
    path = written(tmp_path / "model.onnx", *scan(scan_input_axes=[1], scan_output_axes=[1]), "y", "last")
    x = torch.randn(BATCH, 12, 3)
    given = {"x": x.numpy(), "h0": np.zeros((BATCH, 3), np.float32)}
    wanted, _ = map(torch.from_numpy, onnxruntime.InferenceSession(path).run(None, given))
    stream = convert(path)
    first, state = stream(x[:, :5])
    rest, _ = stream(x[:, 5:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1).detach(), wanted)
    rest.sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in stream.parameters())
    with pytest.raises(ConfigError, match=r"Scan of last reads later steps \(backwards\)"):
        convert(written(path, *scan(scan_input_directions=[1]), "y"))


@pytest.mark.parametrize(("kind", "rows", "attributes", "named"), [
    ("LSTM", 4, {"direction": "reverse"}, "LSTM of ys reads later steps"),
    ("GRU", 3, {}, "GRU of ys resets before the product"),
    ("RNN", 1, {"clip": 3.0}, "RNN of ys has functions"),
])  # fmt: skip
def test_what_has_no_stream_is_named(tmp_path, kind, rows, attributes, named):
    nodes, weights, inputs = recurrence(kind, rows, np.random.default_rng(0), **attributes)
    with pytest.raises(ConfigError, match=named):
        convert(written(tmp_path / "model.onnx", nodes, weights, inputs, "result"))


def test_a_condition_of_constants_takes_a_branch(tmp_path):
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(kind, ["x", "x"], [f"{name}_y"])], name, [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)],
        )
        for name, kind in (("then", "Add"), ("else", "Mul"))
    }  # fmt: skip
    most = helper.make_node("Constant", [], ["most"], value_float=9.0)
    nodes = [
        most,
        helper.make_node("Less", ["rate", "most"], ["low"]),
        helper.make_node("If", ["low"], ["y"], **branches),
    ]
    path = written(tmp_path / "model.onnx", nodes, {}, {"x": ["batch", "steps"], "rate": []}, "y")
    x = torch.randn(2, 3)
    assert torch.equal(ONNXModule(path, {"rate": 8.0})(x), x + x)
    assert torch.equal(ONNXModule(path, {"rate": 10.0})(x), x * x)
    with pytest.raises(ConfigError, match="has the operator If"):
        ONNXModule(path)


def test_bad_files(tmp_path):
    x = {"x": ["batch", 3, "steps"], "gain": [1]}
    one = helper.make_node("Mul", ["x", "gain"], ["y"])
    path = written(tmp_path / "model.onnx", [one], {}, x, "y")
    with pytest.raises(ConfigError, match=r"the file has the inputs \['x', 'gain'\]"):
        convert(path)
    with pytest.raises(ConfigError, match=r"inputs has 'again', expected names of \['x', 'gain'\]"):
        convert(path, inputs={"again": 2.0})
    y, _ = convert(path, inputs={"gain": 2.0}, time=2)(torch.ones(1, 3, 4))
    assert torch.equal(y, 2 * torch.ones(1, 3, 4))
    nodes, weights, inputs = recurrence("GRU", 3, np.random.default_rng(0), linear_before_reset=1)
    nodes[3].input[5] = "relu"
    with pytest.raises(ConfigError, match="GRU of ys has lengths, or a first state that is computed"):
        convert(written(path, nodes, weights, inputs, "result"))
    other = helper.make_node("Hardmax", ["x"], ["y"], axis=1)
    with pytest.raises(ConfigError, match="has the operator Hardmax"):
        convert(written(tmp_path / "model.onnx", [other], {}, x, "y"))

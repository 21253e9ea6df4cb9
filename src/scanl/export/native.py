"""Which ops have an operator of their own in ONNX. The table is `NATIVE`; every other op becomes a `Scan`.

The operators are calls in a domain of scanl at first, because the converter of versions knows ONNX up to `CONVERTED`
alone. `settled` moves them to the domain of ONNX.
"""

import math
from typing import Any

import torch
from torch import Tensor

from scanl.export.lowering import LoweredCall, Native

CONVERTED, OPSET = 25, 27  # the last opset of the converter, and the first one with the operators of `NATIVE`
DOMAIN = "scanl"


def _linear_attention(call: LoweredCall) -> tuple[Tensor, Tensor] | None:
    if "u" in call.operands or "gv" in call.operands:
        return None
    return _memory(call, "linear" if "g" not in call.operands else "gated")


def _delta_rule(call: LoweredCall) -> tuple[Tensor, Tensor] | None:
    if call.options["normalize_keys"]:
        k = call.operands["k"]
        k = k * (k.square().sum(-1, keepdim=True) + call.options["eps"]).rsqrt()
        call = call._replace(operands={**call.operands, "k": k})
    return _memory(call, "delta" if "g" not in call.operands else "gated_delta")


def _memory(call: LoweredCall, rule: str) -> tuple[Tensor, Tensor] | None:
    """Call LinearAttention. Its operands have the heads within the last axis; here each head of v has its own q."""
    if call.state.dtype != torch.float32:
        return None
    v, scale = call.operands["v"], call.options["scale"]
    heads = v.shape[2]
    q, k = (call.operands[name].repeat_interleave(heads // call.operands[name].shape[2], 2) for name in "qk")
    g = call.operands.get("g")
    if g is not None and g.ndim == 1:
        g = g.expand(*v.shape[:2], heads)
    inputs = [q.flatten(2), k.flatten(2), v.flatten(2), call.state, None if g is None else g.flatten(2)]
    beta = call.operands.get("beta")
    attributes = {
        "q_num_heads": heads,
        "kv_num_heads": heads,
        "update_rule": rule,
        "scale": 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale,
    }
    y, last = _operator("LinearAttention", [*inputs, beta], attributes, (inputs[2], call.state))
    return y.unflatten(-1, (heads, v.shape[-1])), last


def _short_convolution(call: LoweredCall) -> tuple[Tensor, Tensor] | None:
    if call.state.dtype != torch.float32 or call.state.shape[1] == 0:
        return None
    x, w = call.operands["x"].mT, call.operands["w"].unsqueeze(1)
    window = call.state.mT
    attributes = {"activation": "silu" if call.options["silu"] else "none"}
    y, last = _operator("CausalConvWithState", [x, w, call.operands.get("bias"), window], attributes, (x, window))
    return y.mT, last.mT


def _operator(
    name: str, inputs: list[Tensor | None], attributes: dict, like: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Call an operator of ONNX whose two results have these shapes and dtypes."""
    y, last = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        inputs,
        attributes,
        dtypes=[value.dtype for value in like],
        shapes=[value.shape for value in like],
        version=1,
    )
    return y, last


def settled(model: Any) -> None:
    """Move the operators to the domain of ONNX, in a model of `onnx_ir`, and drop numbers that no operator reads."""
    for body in model.graph.subgraphs():
        for name in [name for name, value in body.initializers.items() if not value.uses()]:
            del body.initializers[name]
    native = [node for node in model.graph if node.domain == DOMAIN]
    for node in native:
        node.domain, node.version = "", OPSET
    if native:
        del model.opset_imports[DOMAIN]
        model.opset_imports[""] = OPSET


NATIVE: dict[str, Native] = {
    "linear_attention": _linear_attention,
    "delta_rule": _delta_rule,
    "short_convolution": _short_convolution,
}

"""ODEFWP: its equation step by step, what only it knows, and what it refuses."""

from functools import partial

import pytest
import torch

from by_hand import DIM, layer_norm, linear, sigmoid
from scanl.layers.ode.odefwp import ODEFWP
from tests.layers.ode.equations import cosine, last_output, moved, ones

pytestmark = pytest.mark.cells_by_loop


def odefwp(layer, xs, spans=None):
    """With W (V, K) of each head, as in the paper."""
    net, K, ys = layer.update_net, DIM // layer.num_heads, []
    ws = [torch.zeros(K, K) for _ in range(layer.num_heads)]
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        h, read = layer_norm(linear(net.input_proj, x), net.input_layer_norm), []
        parts = linear(net.kvb_net, h).chunk(layer.num_heads)
        queries = linear(layer.query_net, h).chunk(layer.num_heads)
        for head, (part, q) in enumerate(zip(parts, queries, strict=True)):
            k, v, beta = part[:K], part[K : 2 * K], sigmoid(part[2 * K])

            def rule(w, k=k, v=v, beta=beta):
                if layer.variant == "oja":
                    return torch.outer(torch.tanh(v), beta * torch.softmax(k - w.T @ torch.tanh(v), 0))
                k = torch.softmax(k, 0)
                missing = {
                    "hebb": torch.tanh(v),
                    "delta": torch.tanh(v - w @ k),
                    "delta_linear": torch.tanh(v) - w @ k,
                }[layer.variant]
                return beta * torch.outer(missing, k)

            ws[head] = moved(rule, ws[head], span, layer.method, layer.substeps)
            read.append(ws[head] @ torch.softmax(q, 0))
        ys.append(linear(layer.out_proj, torch.cat(read)))
    return ys


OF_ODEFWP = {
    "odefwp": [0.482755439241, 0.612831212937, 0.450682814957, 0.496334105230],
    "odefwp_oja": [0.502815048352, 0.693209474471, 0.460275630008, 0.534895359474],
    "odefwp_hebb": [0.505032576611, 0.692867085585, 0.461035783105, 0.534679067983],
    "odefwp_linear_rk4": [0.478105672662, 0.591599326089, 0.448301957189, 0.487790763728],
}


EQUATIONS = {
    "odefwp": (lambda: ODEFWP(DIM, 2), odefwp),
    "odefwp_euler": (lambda: ODEFWP(DIM, 4, "delta", "euler", 2), odefwp),
    "odefwp_oja": (lambda: ODEFWP(DIM, 2, "oja"), odefwp),
    "odefwp_hebb": (lambda: ODEFWP(DIM, 2, "hebb", substeps=2), odefwp),
    **{
        f"odefwp_linear_{method}": (partial(ODEFWP, DIM, 2, "delta_linear", method, 3), odefwp)
        for method in ("euler", "midpoint", "rk4")
    },
}

REFUSED = [
    (lambda: ODEFWP(8, 3), "odefwp: num_heads is 3, expected a divisor of dim=8"),
    (lambda: ODEFWP(8, variant="heb"), "odefwp: unknown variant 'heb'; did you mean 'hebb'"),
    (lambda: ODEFWP(8, method="rk5"), "odefwp: unknown method 'rk5'; did you mean 'rk4'"),
    (lambda: ODEFWP(8, substeps=0), "odefwp: substeps is 0, expected at least 1"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", OF_ODEFWP)
def test_rules_of_the_authors_odefwp(name):
    """Two Euler steps for each input along the vector fields of their program, with cosines as above."""
    layer = cosine(EQUATIONS[name][0]())
    layer.method, layer.substeps = "euler", 2
    torch.testing.assert_close(last_output(layer), torch.tensor(OF_ODEFWP[name]), atol=1e-9, rtol=0)

"""CfCNCP: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM
from scanl.layers.ode.cfc_ncp import CfCNCP
from tests.layers.ode.equations import closed, mixed, ones


def cfc_ncp(layer, xs, spans=None):
    parts = [layer.rnn_cell.layer_0, layer.rnn_cell.layer_1, layer.rnn_cell.layer_2]
    sizes = [len(part.ff1.bias) for part in parts]
    h, c, ys = torch.zeros(layer.width), torch.zeros(layer.width), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        if layer.lstm is not None:
            h, c = mixed(layer.lstm, x, h, c)
        below, news = x, []
        for part, own in zip(parts, h.split(sizes), strict=True):
            below = closed(part, layer.variant, torch.cat([below, own]), span)
            news.append(below)
        h = torch.cat(news)
        ys.append(below)
    return ys


EQUATIONS = {
    "cfc_ncp": (lambda: CfCNCP(DIM), cfc_ncp),
    "cfc_ncp_pure": (lambda: CfCNCP(DIM, 15, 0.2, 3, "pure"), cfc_ncp),
    "cfc_ncp_mixed": (lambda: CfCNCP(DIM, 13, variant="no_gate", mixed_memory=True), cfc_ncp),
}

REFUSED = [
    (lambda: CfCNCP(8, 10), "cfc_ncp: width is 10, expected at least 3 more than dim=8"),
    (lambda: CfCNCP(8, sparsity_level=1.0), "cfc_ncp: sparsity_level is 1.0, expected less than 1"),
    (lambda: CfCNCP(8, seed=-1), "cfc_ncp: seed is -1, expected 0 to 4294967295"),
    (lambda: CfCNCP(8, variant="pur"), "cfc_ncp: unknown variant 'pur'; did you mean 'pure'"),
]

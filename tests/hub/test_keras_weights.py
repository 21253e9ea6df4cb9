"""Weights of Keras in torch's modules, against the equations of Keras; what does not fit, by one line."""

import numpy as np
import pytest
import torch
from torch import nn

from scanl.errors import ConfigError, ShapeError
from scanl.hub import keras_weights

D, H, T = 3, 5, 4


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(x, kernel, recurrent_kernel, bias):
    """Keras' GRU with reset_after: gates z, r, h."""
    h = np.zeros(H)
    for step in x:
        of_x, of_h = step @ kernel + bias[0], h @ recurrent_kernel + bias[1]
        z, r = sigmoid(of_x[:H] + of_h[:H]), sigmoid(of_x[H : 2 * H] + of_h[H : 2 * H])
        h = z * h + (1 - z) * np.tanh(of_x[2 * H :] + r * of_h[2 * H :])
    return h


def lstm(x, kernel, recurrent_kernel, bias):
    """Keras' LSTM: gates i, f, c, o."""
    h = c = np.zeros(H)
    for step in x:
        i, f, g, o = np.split(step @ kernel + h @ recurrent_kernel + bias.reshape(-1, 4 * H).sum(0), 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
    return h


@pytest.mark.parametrize(
    ("kind", "gates", "rows", "cudnn"), [("GRU", 3, 2, False), ("LSTM", 4, 1, False), ("LSTM", 4, 2, True)]
)
def test_torch_computes_what_keras_computes(kind, gates, rows, cudnn):
    draw = np.random.default_rng(0)
    kernel, recurrent_kernel, bias = (draw.normal(size=(n, gates * H)).astype(np.float32) for n in (D, H, rows))
    x = draw.normal(size=(T, D)).astype(np.float32)
    module = getattr(nn, kind)(D, H, batch_first=True)
    weights = keras_weights(kind, kernel, recurrent_kernel, bias, cudnn=cudnn)
    module.load_state_dict({f"{name}_l0": weight for name, weight in weights.items()})
    if cudnn:  # as Keras reads such a file into its LSTM
        kernel = np.hstack([gate.T.reshape(gate.shape, order="F") for gate in np.hsplit(kernel, gates)])
        recurrent_kernel = np.hstack([gate.T for gate in np.hsplit(recurrent_kernel, gates)])
    wanted = {"GRU": gru, "LSTM": lstm}[kind](x, kernel, recurrent_kernel, bias)
    y = module(torch.from_numpy(x)[None])[0][0, -1]
    torch.testing.assert_close(y, torch.from_numpy(wanted).float())


def test_what_does_not_fit():
    with pytest.raises(ConfigError, match="kind of keras_weights"):
        keras_weights("GRUs", np.zeros((D, 3 * H)), np.zeros((H, 3 * H)))
    with pytest.raises(ShapeError, match=r"expected \(D, 4 H\)"):
        keras_weights("LSTM", np.zeros((D, 3 * H)), np.zeros((H, 3 * H)))
    with pytest.raises(ConfigError, match="resets before"):
        keras_weights("GRU", np.zeros((D, 3 * H)), np.zeros((H, 3 * H)), np.zeros(3 * H))
    with pytest.raises(ShapeError, match=r"have shapes \(3, 15\), \(15,\), expected"):
        keras_weights("GRU", np.zeros((3, 15)), np.zeros(15))
    with pytest.raises(ShapeError, match=r"bias has shape \(7,\), expected"):
        keras_weights("GRU", np.zeros((D, 3 * H)), np.zeros((H, 3 * H)), np.zeros(7))

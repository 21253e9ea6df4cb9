"""Weights of Keras' recurrent layers in the order of torch's."""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from scanl.errors import ConfigError, ShapeError, nearest

GATES = {"GRU": (1, 0, 2), "LSTM": (0, 1, 2, 3)}  # places in Keras of the gates in the order of torch


def keras_weights(
    kind: str, kernel: ArrayLike, recurrent_kernel: ArrayLike, bias: ArrayLike | None = None, *, cudnn: bool = False
) -> dict[str, Tensor]:
    """Return the weights of one layer of torch's nn.GRU or nn.LSTM: weight_ih, weight_hh and, with biases, bias_ih and
    bias_hh. `load_state_dict` takes them under these names with an ending: _l0, _l0_reverse, _l1, ...

    kind: "GRU", of a layer with `reset_after=True`, or "LSTM".   kernel, recurrent_kernel, bias: of the Keras layer,
    (D, gates H), (H, gates H) and (gates H,) or (2, gates H), as its `get_weights()` or its HDF5 file has them.
    cudnn: whether the layer was a CuDNNLSTM or CuDNNGRU, as an LSTM with a bias of 8 H is: its matrices lie otherwise.

    Torch's functions are those of Keras' defaults: tanh, and sigmoid for the gates.
    """
    if kind not in GATES:
        raise nearest("kind of keras_weights", kind, GATES)
    order = GATES[kind]
    of_input, of_state = (np.asarray(weight, np.float32) for weight in (kernel, recurrent_kernel))
    hidden, columns = of_state.shape if of_state.ndim == 2 else (0, 0)
    if not hidden or columns != len(order) * hidden or of_input.ndim != 2 or of_input.shape[1] != columns:
        raise ShapeError(
            f"keras_weights: kernel, recurrent_kernel have shapes {of_input.shape}, {of_state.shape}, expected "
            f"(D, {len(order)} H), (H, {len(order)} H) of a {kind}"
        )

    def matrix(weight: np.ndarray) -> Tensor:
        gates = np.split(weight, len(order), 1)
        rows = [gates[gate].reshape(hidden, -1) if cudnn else gates[gate].T for gate in order]
        return torch.from_numpy(np.concatenate(rows).copy())

    weights = {"weight_ih": matrix(of_input), "weight_hh": matrix(of_state)}
    if bias is None:
        return weights
    both = np.asarray(bias, np.float32)
    if both.shape not in ((columns,), (2 * columns,), (1, columns), (2, columns)):
        raise ShapeError(
            f"keras_weights: bias has shape {both.shape}, expected ({columns},) or (2, {columns}) of a {kind}"
        )
    both = both.reshape(-1, columns)
    if kind == "GRU" and len(both) == 1:
        raise ConfigError(
            "keras_weights: bias is one row of a GRU with reset_after=False, which resets before the product; torch "
            "resets after it"
        )
    first, second = both if len(both) == 2 else (both[0], np.zeros(columns, np.float32))
    for name, row in (("bias_ih", first), ("bias_hh", second)):
        weights[name] = torch.from_numpy(np.concatenate([row.reshape(len(order), -1)[gate] for gate in order]))
    return weights

"""NeuralWaveMachine: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM, linear, sigmoid
from scanl.layers.ode.nwm import NeuralWaveMachine


def nwm(layer, xs):
    size = layer.side
    y, z, ys = torch.zeros(size, size), torch.zeros(size, size), []
    dt, gamma, epsilon = layer.dt, getattr(layer, "gamma", 0), getattr(layer, "damping", 0)
    if layer.trained:
        dt, gamma, epsilon = sigmoid(layer.dt), torch.relu(layer.gamma), torch.relu(layer.alpha)

    def near(conv, grid, i, j):
        kernel = conv.weight[0, 0]
        rows, columns = kernel.shape
        return conv.bias[0] + sum(
            kernel[k, m] * grid[(i + k - rows // 2) % size, (j + m - columns // 2) % size]
            for k in range(rows)
            for m in range(columns)
        )

    for x in xs:
        given, new = linear(layer.Wx, x).view(size, size), torch.zeros(size, size)
        for i in range(size):
            for j in range(size):
                force = torch.tanh(given[i, j] + near(layer.Wz, z, i, j) + near(layer.Wy, y, i, j))
                new[i, j] = (z[i, j] + dt * (force - gamma * y[i, j] - epsilon * z[i, j])).squeeze()
        z = new
        y = y + dt * z
        ys.append(linear(layer.readout, y.flatten()))
    return ys


EQUATIONS = {
    "nwm": (lambda: NeuralWaveMachine(DIM, 3, dt=0.3), nwm),
    "nwm_rings": (lambda: NeuralWaveMachine(DIM, 3, "rings", trained=True), nwm),
}

REFUSED = [
    (lambda: NeuralWaveMachine(8, 0), "nwm: side is 0, expected at least 1"),
    (lambda: NeuralWaveMachine(8, variant="rngs"), r"nwm: unknown variant 'rngs'; did you mean 'rings'\?"),
]

"""A recurrent network of the nodes of a graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.layers.state import Device, DType
from scanl.models.presets import whole
from scanl.models.saving import Saved
from scanl.options import at_least

if TYPE_CHECKING:
    from scanl.data.batch import Batch


@whole("graph_network", "GNN", "RecGNN", "recurrent_gnn", "recurrent_graph_neural_network", "graph_neural_network")
class GraphNetwork(Saved):
    r"""A recurrent graph network: each node's state is a mean over its neighbors, and a step passes messages once.

    .. math:: x_v \leftarrow \frac{1}{|N(v)|} \sum_{u \in N(v)} f_\theta(x_u, l_v, l_u), \quad
        f = \tanh(W x_u + U l_v + R l_u + b), \quad o_v = g(x_v, l_v)

    Where ‖W‖ < 1 the step contracts, in the norm whose squares are weighted by the degrees. So states have one fixed
    point at labels that are held, from any start. `contract` divides W by its norm over 0.95 where that is above 1.
    `rbp`, `cg_rbp` and `neumann_rbp` train the network at its fixed points. Other algorithms train it as a network over
    time, which passes messages once a step.

    Parameters: W (H, H), U and R (H, L), b (H); the output map g, linear, of H + L numbers.

    Source: Scarselli et al., "The Graph Neural Network Model", IEEE Trans. Neural Networks 20(1), 2009;
    Gori, Monfardini and Scarselli, IJCNN 2005. Differs: the sum is divided by |N(v)|, and W is bounded, where the paper
    has a penalty on expansion.
    """

    name = "graph_network"

    def __init__(
        self,
        edges: Annotated[Sequence[Sequence[int]], "pairs of nodes, u and v; messages go both ways"],
        nodes: Annotated[int, at_least(1), "N"],
        labels: Annotated[int, at_least(1), "L, numbers that describe a node"],
        dim: Annotated[int, at_least(1), "H, numbers of a node's state"],
        outputs: Annotated[int, at_least(1), "C, numbers that are read out at a node"],
    ) -> None:
        super().__init__()
        pairs = torch.tensor([list(pair) for pair in edges], dtype=torch.int64).reshape(-1, 2)
        if pairs.numel() and not (int(pairs.min()) >= 0 and int(pairs.max()) < nodes):
            raise ConfigError(f"graph_network: edges go up to node {int(pairs.max())}, expected 0 to {nodes - 1}")
        self.nodes, self.labels, self.dim = nodes, labels, dim
        adjacency = torch.zeros(nodes, nodes)
        adjacency[pairs[:, 0], pairs[:, 1]] = adjacency[pairs[:, 1], pairs[:, 0]] = 1
        self.register_buffer("adjacency", adjacency / adjacency.sum(1, keepdim=True).clamp_min(1), persistent=False)
        self.W = nn.Parameter(0.9 * nn.init.orthogonal_(torch.empty(dim, dim)))
        self.U = nn.Linear(labels, dim)
        self.R = nn.Linear(labels, dim, bias=False)
        self.output = nn.Linear(dim + labels, outputs)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        """Return states of zeros (B, N, H)."""
        dtype = self.W.dtype if dtype is None else dtype
        return torch.zeros(batch_size, self.nodes, self.dim, device=device, dtype=dtype)

    def contract(self) -> Tensor:
        """Return W, divided by its spectral norm over 0.95 where that is above 1."""
        return self.W / (torch.linalg.matrix_norm(self.W, ord=2) / 0.95).clamp_min(1)

    def step(self, labels: Tensor, state: Tensor) -> Tensor:
        """Return the states (B, N, H) after each node has read its neighbors. labels: (B, N, L)."""
        receiver, sent = self.U(labels)[:, :, None], (F.linear(state, self.contract()) + self.R(labels))[:, None]
        return torch.einsum("vu,bvuh->bvh", self.get_buffer("adjacency"), torch.tanh(receiver + sent))

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map labels of nodes x (B, T, N, L) to outputs (B, T, N, C) and the state (B, N, H).

        Raises ShapeError for a wrong shape of x.
        """
        if x.ndim != 4 or x.shape[2:] != (self.nodes, self.labels):
            raise ShapeError(
                f"graph_network: x has shape {tuple(x.shape)}, expected (B, T, {self.nodes}, {self.labels})"
            )
        state = self.init_state(len(x), device=x.device) if state is None else state
        x, outputs = x.to(self.W.dtype), []
        for labels in x.unbind(1):
            state = self.step(labels, state)
            outputs.append(self.output(torch.cat([state, labels], 2)))
        return (torch.stack(outputs, 1) if outputs else x.new_zeros(*x.shape[:3], self.output.out_features)), state


def node_loss(model: GraphNetwork, batch: "Batch", state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of the classes of the nodes (B, T, N), where they are not -1, and the state."""
    outputs, state = model(batch.inputs, state)
    valid = batch.targets >= 0
    total = F.cross_entropy(outputs[valid], batch.targets[valid], reduction="sum")
    return total / valid.sum().clamp_min(1), state

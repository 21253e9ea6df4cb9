"""The recurrent graph network: its fixed point, its symmetry, and learning by recurrent backpropagation."""

import networkx
import pytest
import torch

from scanl.data.batch import Batch
from scanl.errors import ConfigError, ShapeError
from scanl.learning.algorithms import BPTT, RBP, NeumannRBP
from scanl.models import GraphNetwork
from scanl.models.whole.graph_network import node_loss

EDGES = [(0, 1), (1, 2), (2, 3), (3, 0), (1, 3), (3, 4)]


def network(edges=EDGES):
    torch.manual_seed(0)
    return GraphNetwork(edges, 5, 2, 3, 2).double()


def settle(model, labels, state=None):
    for _ in range(300):
        state = model(labels, state)[1]
    return state


def test_a_step_is_the_mean_over_neighbors():
    model, labels, state = network(), torch.randn(1, 5, 2).double(), torch.randn(1, 5, 3).double()
    after = model.step(labels, state)
    for v in range(5):
        neighbors = [a + b - v for a, b in EDGES if v in (a, b)]
        messages = [
            torch.tanh(model.W @ state[0, u] + model.U(labels[0, v]) + model.R(labels[0, u])) for u in neighbors
        ]
        torch.testing.assert_close(after[0, v], sum(messages) / len(messages))


def test_it_ends_at_one_fixed_point_from_any_start():
    model, labels = network(), torch.randn(1, 1, 5, 2).double()
    with torch.no_grad():
        model.W.mul_(5)  # bounded again in a step
        ends = [settle(model, labels, 9 * torch.randn(1, 5, 3).double()) for _ in range(2)]
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


def test_renamed_nodes_have_renamed_outputs():
    order = torch.tensor([2, 0, 4, 1, 3])
    place = {int(node): i for i, node in enumerate(order)}
    model, renamed = network(), network([(place[a], place[b]) for a, b in EDGES])
    labels = torch.randn(1, 3, 5, 2).double()
    torch.testing.assert_close(renamed(labels[:, :, order])[0], model(labels)[0][:, :, order])


def test_the_gradient_at_the_fixed_point_is_the_unrolled_one():
    model, labels = network(), torch.randn(2, 1, 5, 2).double()
    targets = torch.tensor([[[0, 1, -1, 0, 1]], [[1, -1, 0, 0, 0]]])
    held = Batch(labels.expand(2, 300, 5, 2), torch.cat([-torch.ones(2, 299, 5).long(), targets], 1))
    BPTT(node_loss).update(model, model.init_state(2), held)[0].backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    algorithm = RBP(node_loss, tolerance=1e-14)
    algorithm.update(model, algorithm.init(model, 2), Batch(labels, targets))[0].backward()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, value, rtol=1e-9, atol=1e-9)


def test_it_finds_the_two_halves_of_the_karate_club_from_every_other_member():
    club = networkx.karate_club_graph()
    halves = torch.tensor([int(club.nodes[v]["club"] == "Officer") for v in club])
    targets = -torch.ones(1, 1, 34, dtype=torch.int64)
    targets[0, 0, ::2] = halves[::2]
    labels = torch.zeros(1, 1, 34, 2)
    labels[0, 0, [0, 33], [0, 1]] = 1.0  # the two leaders
    torch.manual_seed(0)
    model = GraphNetwork(list(club.edges), 34, 2, 4, 2)
    algorithm = NeumannRBP(node_loss, terms=10, tolerance=1e-4)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    learner = algorithm.init(model, 1)
    for _ in range(60):
        optimizer.zero_grad()
        loss, learner = algorithm.update(model, learner, Batch(labels, targets))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        answers = model(labels, learner)[0][0, 0].argmax(1)
    assert (answers == halves)[1::2].float().mean() > 0.85  # of members whose half it was not told


def test_wrong_graphs_and_labels_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="graph_network: edges go up to node 7, expected 0 to 4"):
        network([(0, 7)])
    with pytest.raises(ShapeError, match="graph_network: x has shape"):
        network()(torch.zeros(1, 1, 4, 2))
    model = network()
    model.save(tmp_path)
    labels = torch.zeros(1, 1, 5, 2)
    torch.testing.assert_close(GraphNetwork.load(tmp_path).double()(labels)[0], model(labels)[0])

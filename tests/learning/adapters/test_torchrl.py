"""The module passes TorchRL's checks of specs, and reads a rollout in one scan as it was read step by step."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchrl, about itself
    pytest.importorskip("torchrl.collectors", reason="torchrl is not installed: pip install 'scanl[agents]'")

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn import functional as F
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs
from torchrl.modules import set_recurrent_mode
from torchrl.modules.utils import get_primers_from_module

from scanl.learning.adapters.torchrl import ScanModule

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchrl


def parts(layer, envs=None):
    torch.manual_seed(0)
    memory = ScanModule(4, 16, layer, in_key="observation", out_key="embedding")
    head = TensorDictModule(nn.Linear(16, 2), in_keys=["embedding"], out_keys=["action_value"])
    base = GymEnv("CartPole-v1") if envs is None else SerialEnv(envs, lambda: GymEnv("CartPole-v1"))
    env = TransformedEnv(base, InitTracker())
    choice = TensorDictModule(lambda q: F.one_hot(q.argmax(-1), 2), in_keys=["action_value"], out_keys=["action"])
    policy = TensorDictSequential(memory, head, choice)
    env.append_transform(get_primers_from_module(policy))
    env.set_seed(0)
    return env, policy


@pytest.mark.parametrize("layer", ["lru", "retnet"])
@pytest.mark.parametrize("envs", [None, 16])
def test_a_rollout_is_one_scan(layer, envs):
    env, policy = parts(layer, envs)
    check_env_specs(env)
    with torch.no_grad():
        data = env.rollout(50, policy, break_when_any_done=False)
    assert data["is_init"][..., 1:, :].any()
    expected = data["action_value"].clone()
    data = data.exclude("action_value", "embedding")
    with set_recurrent_mode(True):
        policy(data)
    torch.testing.assert_close(data["action_value"], expected, rtol=1e-4, atol=1e-5)
    data["action_value"].sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())
    assert (data["next", "recurrent_state"][..., -1, 0] == 1).all()


def test_a_collector_and_saving(tmp_path):
    env, policy = parts("retnet")
    for batch in Collector(env, policy, frames_per_batch=20, total_frames=40):
        assert batch["recurrent_state"].shape == (20, policy[0].body.row_size)
    torch.save(policy.state_dict(), tmp_path / "policy.pt")
    _, again = parts("retnet")
    again.load_state_dict(torch.load(tmp_path / "policy.pt"))
    first = env.reset()
    torch.testing.assert_close(again(first.clone())["action_value"], policy(first)["action_value"], rtol=0, atol=0)


def test_tensors_alone():
    """A call with tensors, without a state: from the state before any step."""
    memory = ScanModule(4, 16, "lru")
    x, never = torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.bool)
    y, row = memory(x, torch.zeros(3, memory.body.row_size), never)
    torch.testing.assert_close(y, memory.body(x[:, None])[0][:, 0])
    assert row.shape == (3, memory.body.row_size)

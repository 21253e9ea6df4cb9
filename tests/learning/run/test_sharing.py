"""Processes that share a run: a divided model learns as the whole one, and its checkpoint fits any number of them."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from scanl import layers
from scanl.cli.train import by_launcher
from scanl.errors import CheckpointError, ConfigError
from scanl.layers import param_groups
from scanl.learning import TrainConfig
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.run import shards, torchrun
from scanl.learning.run.checkpoint import OWN_PARTS, PARTS
from scanl.learning.run.run import Run
from scanl.learning.run.shards import check_shards, read_shards, write_shards
from scanl.learning.run.sharing import placed, shard, undivided_tensor
from scanl.models import LanguageModel, Stack

# The states that a block returns may be views, and nobody writes into them.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

COVERS = ["learning/run/shards", "learning/run/strategy", "learning/run/torchrun"]

FEW = ("gru", "hgrn2", "mingru", "rwkv7")
EVERY = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in layers.names()]


@pytest.fixture(scope="module")
def mesh():
    """The mesh of one process, which works as several do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def learned(model, optimizer, x):
    """Take two steps, and return their losses and the weights."""
    losses = []
    for _ in range(2):
        torch.manual_seed(1)  # of dropout and of injected noise
        y, _ = model(x)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), {name: undivided_tensor(weight) for name, weight in model.state_dict().items()}


@pytest.mark.cells_by_loop("name")
@pytest.mark.parametrize("name", EVERY)
def test_a_divided_layer_learns_as_the_layer(name, mesh):
    whole = Stack(12, 2, name, layer_options=layers.get(name).sample)
    divided = copy.deepcopy(whole)
    shard(divided, mesh)
    assert all(isinstance(weight, DTensor) for weight in divided.parameters())
    x = torch.randn(2, 9, 12)
    results = [learned(model, torch.optim.SGD(param_groups(model), 0.1), x) for model in (whole, divided)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_shards(name, mesh):
    whole = Stack(12, 1, "mingru")
    divided = copy.deepcopy(whole)
    shard(divided, mesh)
    x = torch.randn(2, 9, 12)
    results = [learned(model, OPTIMIZERS[name](model, 0.01, 0.1), x) for model in (whole, divided)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_gradients_of_shards_are_clipped(mesh):
    whole = Stack(12, 1, "mingru")
    divided, results = copy.deepcopy(whole), []
    shard(divided, mesh)
    x = torch.randn(2, 9, 12)
    for model in (whole, divided):
        model(x)[0].square().sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        norm = undivided_tensor(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        results.append((norm, {n: undivided_tensor(weight.grad) for n, weight in model.named_parameters()}))
    assert results[0][0] > 0.1
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.fixture
def checkpoint(mesh):
    """A checkpoint of a divided model, as far as it has weights."""
    model = LanguageModel(5, Stack(8, 1, "mingru"))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    shard(model, mesh)
    own = {name: kinds[0]() for name, kinds in OWN_PARTS.items()}
    own |= {"plan": {"steps": 1}, "place": {"batch": 0, "step": 0}}
    parts = {name: kinds[0]() for name, kinds in PARTS.items()} | {"metrics": {"size": 0, "sha256": ""}}
    return weights, {**parts, "scanl": own, "state_dict": model.state_dict()}


def test_shards_are_read_whole_and_divided(checkpoint, mesh, tmp_path):
    weights, written = checkpoint
    path = tmp_path / "checkpoint.ckpt"
    write_shards(written, path)
    for found in (read_shards(path), read_shards(path, mesh)):
        assert found["scanl"] == written["scanl"]
        for name, value in found["state_dict"].items():
            torch.testing.assert_close(undivided_tensor(value), weights[name], rtol=0, atol=0)
    assert isinstance(placed(weights["head.weight"], written["state_dict"]["head.weight"]), DTensor)


def test_a_checkpoint_is_whole_or_the_one_before(checkpoint, tmp_path, monkeypatch):
    """A process that is killed before the last rename leaves a folder, which nothing names and the next one removes."""
    path, (weights, written) = tmp_path / "checkpoint.ckpt", checkpoint
    (tmp_path / "shards-of mine").mkdir()
    write_shards(written, path)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_checkpoint", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_shards(
                {**written, "state_dict": {name: value * 2 for name, value in written["state_dict"].items()}}, path
            )
    assert len(list(tmp_path.glob("shards-[0-9]"))) == 2
    found = read_shards(path)
    check_shards(found, path)
    torch.testing.assert_close(found["state_dict"], weights, rtol=0, atol=0)
    write_shards(written, path)
    assert {folder.name for folder in tmp_path.glob("shards-*")} == {"shards-3", "shards-of mine"}


def test_damaged_shards_are_refused(checkpoint, tmp_path):
    path = tmp_path / "checkpoint.ckpt"
    write_shards(checkpoint[1], path)
    found = read_shards(path)
    (file,) = (tmp_path / "shards-1").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"safetensors is damaged or cut short: its bytes do not fit its digest"):
        check_shards(found, path)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        check_shards(found, path)
    with pytest.raises(CheckpointError, match=r"needs 2816 bytes of .*shards-1, which has 0"):
        read_shards(path)


WRONG = {
    "devices is 3, expected a multiple of 2 because of sequence_parallel": {"devices": 3, "sequence_parallel": 2},
    "algorithm is rtrl with options .*, expected bptt in one segment because strategy is fsdp": {
        "algorithm": "rtrl",
        "strategy": "fsdp",
    },
    "expected bptt in one segment because sequence_parallel is 2": {
        "algorithm_options": {"segments": 2},
        "devices": 2,
        "sequence_parallel": 2,
    },
    "carry_state is True, expected False because sequence_parallel is 2": {
        "carry_state": True,
        "devices": 2,
        "sequence_parallel": 2,
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_options_that_do_not_fit_several_processes_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.of(**WRONG[message]).check()


def test_sequences_with_one_answer_are_not_divided():
    config = TrainConfig.of(data=["adding"], devices=2, sequence_parallel=2, dim=8, depth=1)
    with pytest.raises(ConfigError, match="expected 1 because adding asks for other answers than the next token"):
        Run(config)


def test_torchrun_says_how_many_processes_there_are(monkeypatch):
    with monkeypatch.context() as patch:
        for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
            patch.setenv(name, value)
        assert (torchrun.processes(), torchrun.machines()) == (4, 2)
        assert by_launcher(TrainConfig(), []).run.devices == 4
        with pytest.raises(ConfigError, match="devices is 2, expected 4 because torchrun has started as many"):
            by_launcher(TrainConfig.of(devices=2), ["--devices", "2"])
    assert (torchrun.processes(), torchrun.machines()) == (1, 1)
    assert by_launcher(TrainConfig.of(devices=2), []).run.devices == 2


def test_the_first_process_tells_the_others_the_folder(monkeypatch):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    settings = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port), "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    torchrun.tell(folder="runs/one")
    assert torchrun.told() == "runs/one"
    torchrun.tell(error="train: no data")
    with pytest.raises(ConfigError, match="train: no data"):
        torchrun.told()
    assert json.loads(server.get("scanl/0"))["folder"] == ""

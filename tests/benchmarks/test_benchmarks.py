"""The benchmarks run: each on tiny operands, beside its peers of a CPU, and the summary of a GPU from their rows."""

import contextlib
import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import beside
import cells
import gpu
import harness
import mackey_glass
import run
import seen_to_learn
import slow_corners
import tasks
from quality import learn, recall
from scanl import cli, layers
from scanl.layers import state as states
from scanl.learning import TrainConfig
from scanl.learning.run.config import seeded_model
from scanl.ops import registry

pytestmark = pytest.mark.cells_by_loop("name")

TINY = {
    "linear_scan": (2, 16, 3),
    "linear_attention-mamba2": (1, 16, 4, 8, 5),
    "selective_scan": (2, 16, 6, 4),
    "weighted_average": (2, 16, 6),
    "short_convolution": (2, 16, 6, 4),
    "linear_attention-decode": (3, 1, 2, 8),
    "delta_rule-decode": (3, 1, 2, 8),
}


@pytest.mark.parametrize("name", beside.BENCHMARKS)
def test_each_runs(name, capfd):
    """Those that time what the op computes are checked to agree with it."""
    benchmark = beside.BENCHMARKS[name]
    rows = run.run(name, TINY.get(name, (2, 16, 2, 8)), 1, "cpu", quick=name == "linear_scan")
    found = {row["name"]: row for row in rows}
    assert {"floor", "cpu", "parallel", "reference"} <= set(found)
    assert ("attention" in found) == ("attention" in benchmark.peers)
    assert set(found["cpu"]["seconds"]) == ({"forward", "both"} if benchmark.backward else {"forward"})
    assert "left out" not in capfd.readouterr().out
    shapes = [len(shape) for shape in (benchmark.sweep(16), *benchmark.shapes, TINY.get(name, (2, 16, 2, 8)))]
    assert len(set(shapes)) == 1


@pytest.mark.parametrize("name", ["weighted_average", "linear_attention-decode"])
def test_tables_and_pictures(name, monkeypatch, tmp_path, capfd):
    shape = TINY[name]
    sweep = (lambda n: (n, *shape[1:])) if name.endswith("decode") else (lambda n: (1, n, *shape[2:]))
    small = beside.BENCHMARKS[name]._replace(shapes=(shape,), lengths=(1, 3), sweep=sweep)
    monkeypatch.setitem(beside.BENCHMARKS, name, small)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", name])
    run.main()
    found = json.loads((tmp_path / f"{name}-cpu.json").read_text())
    assert {row["shape"][0] * row["shape"][1] for row in found["rows"]} == {2, 8, shape[0] * shape[1]}
    assert (tmp_path / f"{name}-cpu.png").stat().st_size > 0


def test_every_op_of_a_gpu_is_timed():
    timed = {benchmark.op for benchmark in beside.BENCHMARKS.values()}
    assert {op.name for op in registry.declared() if "triton" in op.backends} <= timed


@pytest.mark.parametrize("name", cells.CELLS)
def test_operands_of_cells(name):
    """They fit the declaration, and the state stays finite over many steps."""
    operands = cells.draw(name, 2, 200, 16)
    y, last = cells.cell_of(name)(**operands, backend="reference")
    assert y.isfinite().all()
    assert last.isfinite().all()


def test_multiplications_of_cells():
    """With recurrent matrices, in D²; slstm has four heads; onlstm one master gate for eight neurons."""
    found = {name: cells.multiplications(name, cells.draw(name, 1, 1, 16)) / 256 for name in cells.CELLS}
    elementwise = {"unicornn_cell": 0, "sru": 0, "indrnn": 0}
    once = {"antisym_cell": 1, "ornn_cell": 1, "lipschitz_cell": 2, "cornn_cell": 2, "ligru": 2}
    gated = {"lem_cell": 4, "layernorm_lstm_cell": 4, "onlstm_cell": 4.25, "slstm": 1}
    assert found == {**elementwise, **once, **gated, "ctrnn_cell": 6, "ltc_fused_cell": 6}


def test_a_wrong_peer_is_left_out(monkeypatch, capfd):
    def wrong(*operands):
        return beside.in_torch(lambda q, k, v: 2 * v, *operands[:3], operands[-1])

    benchmark = beside.BENCHMARKS["linear_attention"]
    peers = {"wrong": beside.Peer(wrong, ("cpu",)), "another": beside.Peer(wrong, ("cpu",), same=False)}
    monkeypatch.setitem(beside.BENCHMARKS, "linear_attention", benchmark._replace(peers=peers))
    rows = run.run("linear_attention", (2, 16, 2, 8), 1, "cpu", quick=False, only=("cpu",))
    assert [row["name"] for row in rows] == ["floor", "cpu", "another"]
    assert "wrong: left out: AssertionError" in capfd.readouterr().out


def test_half_precision_agrees_by_its_norm():
    right = torch.randn(1000).bfloat16()
    run.agree(right + 0.01 * torch.randn(1000), right)
    with pytest.raises(AssertionError, match="of the output's norm"):
        run.agree(right + 0.1 * torch.randn(1000), right)


def test_bytes_of_the_floor():
    q, dy = torch.zeros(4, dtype=torch.float32), torch.zeros(2, dtype=torch.float32)
    assert beside.moved(q, None, q, dy) == (40, 112)  # in, out; and again, with dy, and as many gradients
    floor = beside.copy(q, None, q, dy)
    assert (floor.forward, floor.both) == (40, 112)
    assert floor.call().nbytes == 20  # read and written


def test_summary_of_a_gpu(tmp_path):
    seconds = {"triton": 2.0, "fla": 3.0, "attention": 1.0, "floor": 0.5}
    rows = [
        {"name": name, "seconds": {"forward": s, "both": 4 * s}, "ratio": {"forward": s / 0.5, "both": s / 0.5}}
        for name, s in seconds.items()
    ]
    del rows[2]["seconds"]["both"]
    found = gpu.ratios(rows)
    assert found == [
        {"beside": "fla", "forward": 1.5, "both": 1.5},
        {"beside": "attention", "forward": 0.5},
        {"beside": "floor", "forward": 0.25, "both": 0.25},
    ]
    assert gpu.ratios(rows[1:]) == []
    gpu.picture([{"name": "op", "shape": (1, 2), "times_as_long": found}], "a machine", tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size > 0


def test_picture_of_tasks_from_a_page(tmp_path, monkeypatch):
    """Its numbers are those of the table, its rows grouped by family; what has none comes last."""
    page = Path(__file__).parents[2] / "docs" / "tasks.md"
    rows = tasks.read_table(page.read_text(encoding="utf-8"))
    at = {(row["layer"], row["task"]): row for row in rows}
    assert at["lstm", "selective_copy"] == {"task": "selective_copy", "layer": "lstm", "scaled": 0.91, "solved": False}
    assert tasks.shown(at["gru", "copy"]) == "0.99*"
    names = list(dict.fromkeys(row["layer"] for row in rows))
    groups = tasks.grouped([*names, "a new one"])
    assert sorted(name for members in groups.values() for name in members) == sorted([*names, "a new one"])
    assert groups["others"] == ["a new one"]
    assert all(layers.get(name).name == name for members in tasks.FAMILIES.values() for name in members)
    (tmp_path / "tasks.md").write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["tasks.py", "--redraw", str(tmp_path / "tasks.md")])
    tasks.main()
    assert (tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
@pytest.mark.parametrize("program", [gpu, run], ids=["gpu", "run"])
def test_without_a_gpu(program, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x"] if program is gpu else ["x", "linear_scan", "--device", "cuda"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        program.main()


def test_a_row_that_compares_layers_trains_and_scores_each(tmp_path, monkeypatch, capfd):
    """Two steps of each run; the scores of `scanl eval` are those that are compared."""

    def scanl(*arguments):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert cli.main(list(arguments)) == 0
        return printed.getvalue()

    tiny = "--data-options.length 6 --dim 8 --depth 1 --steps 2 --eval-examples 8 --accelerator cpu"
    sides = seen_to_learn.Side("elman", ("--lr 1e-2",)), seen_to_learn.Side("lru", ("--lr 1e-3",))
    row = seen_to_learn.Beside("irregular", (tiny,), *sides, reached=0.0)
    monkeypatch.setattr(seen_to_learn, "FOLDER", tmp_path)
    monkeypatch.setattr(seen_to_learn, "scanl", scanl)
    monkeypatch.setitem(seen_to_learn.SEEN, "tiny", row)
    monkeypatch.setattr(sys, "argv", ["seen_to_learn.py", "tiny"])
    assert seen_to_learn.main() == 1
    first, second, verdict = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"elman --lr 1e-2: mean squared error \d\S+", first)
    assert re.fullmatch(r"lru --lr 1e-3: mean squared error \d\S+", second)
    assert verdict == "the claim did not hold"
    assert {path.name for path in tmp_path.iterdir()} == {"tiny-elman-1-1", "tiny-lru-1-1"}


@pytest.mark.parametrize(
    ("task", "reached", "missed", "ours", "theirs", "held"),
    [
        ("adding", 0.01, 0.01, [0.009], [0.2, 0.011], True),
        ("adding", 0.01, 0.01, [0.011], [0.2, 0.2], False),
        ("adding", 0.01, 0.01, [0.009], [0.2, 0.009], False),
        ("copy", 0.99, 0.2, [0.1, 1.0], [0.1, 0.19], True),
        ("copy", 0.99, 0.2, [0.98], [0.1, 0.1], False),
        ("copy", 0.99, 0.2, [1.0], [0.1, 0.2], False),
        ("adding", None, None, [0.3, 0.1], [0.2], True),
        ("adding", None, None, [0.2, 0.3], [0.2], False),
        ("copy", None, None, [0.3], [0.4, 0.2], False),
    ],
)
def test_when_a_comparison_holds(task, reached, missed, ours, theirs, held, monkeypatch):
    scores = iter([*ours, *theirs])
    monkeypatch.setattr(seen_to_learn, "trained", lambda *args: next(scores))
    sides = (seen_to_learn.Side(layer, ("",) * len(found)) for layer, found in (("lem", ours), ("lstm", theirs)))
    assert seen_to_learn.Beside(task, ("",), *sides, reached, missed).run("name") == held


def test_the_mackey_glass_series_is_generated_freely(monkeypatch, capfd):
    sizes = mackey_glass.Sizes(units=60, washout=100, fitted=600, starts=3, apart=20, seeds=1)
    x = mackey_glass.series(900)
    slope = 0.2 * (x[:-17] + 1) / (1 + (x[:-17] + 1) ** 10) - 0.1 * (x[17:] + 1)
    torch.testing.assert_close(x[18:] - x[17:-1], slope[:-1], rtol=0, atol=0.02)  # one step of Euler's method
    starts = torch.stack([x[600:700], x[650:750]])
    answers = mackey_glass.ours(x[:600], starts, 0, sizes)
    alone = mackey_glass.ours(x[:600], starts[1:], 0, sizes)
    torch.testing.assert_close(answers[1:], alone, rtol=0, atol=1e-9)
    assert answers.shape == (2, 84)
    assert (answers[:, 0] - x[[700, 750]]).abs().max() < 1e-3 < (x[[700, 750]] - x[[699, 749]]).abs().max()
    assert (answers[:, 19] - x[[719, 769]]).abs().max() < 0.02
    monkeypatch.setattr(mackey_glass, "find_spec", lambda name: None)
    assert mackey_glass.run(sizes, math.inf)
    assert not mackey_glass.run(sizes, 0.0)
    assert "reservoirpy is not installed" in capfd.readouterr().out


@pytest.mark.parametrize(("beside", "held"), [([0.3, 0.1, 0.1], False), ([0.1, 0.2, 0.3], True)])
def test_the_reservoir_is_not_worse_than_that_of_reservoirpy(beside, held, monkeypatch):
    scores = {mackey_glass.ours: [0.15, 0.9, 0.1], mackey_glass.theirs: beside}
    monkeypatch.setattr(mackey_glass, "find_spec", lambda name: name)
    monkeypatch.setattr(mackey_glass, "nrmse", lambda sizes, generate: scores[generate])
    assert mackey_glass.run(mackey_glass.Sizes(), 0.2) == held
    assert not mackey_glass.run(mackey_glass.Sizes(), 0.15)


def test_recall_continues_where_it_stopped_and_draws_each_setting(tmp_path, monkeypatch, capfd):
    """The best learning rate of a memory counts; a second setting has a picture of its own."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "DOCS", tmp_path)
    monkeypatch.setattr(recall, "SCORED", 8)

    def called(*options):
        small = "gla mamba --length 8 --vocabulary 16 --widths 8 --steps 1 --before 1 2"
        monkeypatch.setattr(sys, "argv", ["recall.py", *small.split(), *options])
        recall.main()
        return [line for line in capfd.readouterr().out.splitlines() if line.startswith("layer ")]

    assert len(called("--pairs", "2", "--rates", "1e-2")) == 2
    assert len(called("--pairs", "2", "--rates", "1e-2", "1e-3")) == 2
    assert len(called("--pairs", "2", "--rates", "1e-2", "--again")) == 2
    assert len(called("--pairs", "1", "--rates", "1e-2")) == 2
    rows = harness.Results("recall").rows
    assert int(rows[0]["state"]) == sum(leaf.numel() for _, leaf in state_leaves("gla"))
    for row, accuracy in zip(rows, ("0.25", "0.5", "0.75", "0.5", "0", "0", "1", "0"), strict=True):
        row["accuracy"] = accuracy
    two, one = recall.settings(rows).values()
    assert {row["layer"]: row["accuracy"] for row in two} == {"gla": "0.75", "mamba": "0.5"}
    assert {row["pairs"] for row in one} == {"1"}
    for setting in ("2_8_16_1_2_1", "1_8_16_1_2_1"):
        assert (tmp_path / f"recall_{setting}.png").read_bytes().startswith(b"\x89PNG")


def test_learning_goes_through_the_stages_in_their_order(monkeypatch):
    """Each stage has its own steps, sequences and batch size; one schedule spans them all, with the last rate."""
    read, planned = [], []
    stages = []
    for pairs, length, size, steps, lr in ((1, 4, 3, 2, 1e-2), (2, 8, 5, 1, 1e-3)):
        task = {"length": length, "num_pairs": pairs, "vocab_size": 16}
        given = {"data": ["mqar"], "data_options": task, "layer": "gla", "layer_options": {"num_heads": 1}, "dim": 8}
        config = TrainConfig.of(**given, batch_size=size, steps=steps, lr=lr, seed=0)
        source = config.open_source()
        batch = source.batch
        monkeypatch.setattr(
            source,
            "batch",
            lambda step, size, batch=batch: read.append(batch(step, size)[0].shape) or batch(step, size),
        )
        stages.append((source, config))
    optimize = learn.optimize
    monkeypatch.setattr(learn, "optimize", lambda *given: planned.append(given[1:4]) or optimize(*given))
    source, config = stages[-1]
    learn.learn(seeded_model(config, source.question), *stages)
    assert read == [(3, 4), (3, 4), (5, 8)]
    assert planned == [(3, 1e-3, 0)]


def state_leaves(name):
    """The state of the gated convolution over four steps, and of the memory, at width 8."""
    layer = layers.build(name, 8, **recall.memories(8, 8)[name])
    return [("", torch.zeros(3, 8)), *states.leaves(layer.init_state(1))]


def test_memories_of_recall_have_heads_at_every_width():
    for dim in (8, 32, 128):
        for name, options in recall.memories(dim, 16).items():
            with torch.device("meta"):
                layers.build(name, dim, **options)


def test_slow_corners_times_a_layer_beside_the_lstm(monkeypatch, capsys):
    monkeypatch.setattr(slow_corners, "BATCH", 2)
    monkeypatch.setattr(slow_corners, "STEPS", 8)
    monkeypatch.setattr(slow_corners, "DIM", 16)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # it would hold for all later tests
    monkeypatch.setattr(sys, "argv", ["slow_corners", "gru", "--rounds", "1"])
    slow_corners.main()
    assert re.search(r"^gru +\d", capsys.readouterr().out, re.MULTILINE)

"""The benchmarks run: each on tiny operands, beside its peers of a CPU, and the summary of a GPU from their rows."""

import argparse
import contextlib
import csv
import io
import itertools
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import harness
from quality import learn, memory_claims, recall, seen_to_learn, tasks
from scanl import cli, layers
from scanl.layers import state as states
from scanl.learning import TrainConfig
from scanl.learning.run.config import seeded_model
from scanl.ops import registry
from speed import cells, gpu, peers
from speed import layers as speed_of_layers
from speed import ops as speed_of_ops

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


@pytest.fixture
def options(tmp_path):
    """One round, with rows in a temporary folder."""
    return argparse.Namespace(rounds=1, quick=False, again=False, device="cpu", results=tmp_path)


@pytest.mark.parametrize("name", peers.BENCHMARKS)
def test_each_runs(name, options, capfd):
    """Those that time what the op computes are checked to agree with it. The rows are not measured again."""
    benchmark, shape = peers.BENCHMARKS[name], TINY.get(name, (2, 16, 2, 8))
    options.quick = name == "linear_scan"
    results = harness.Results("ops", options)
    rows = speed_of_ops.run(results, name, shape, options)
    programs = {row["program"] for row in rows}
    assert {"floor", "cpu", "parallel", "reference"} <= programs
    assert ("attention" in programs) == ("attention" in benchmark.peers)
    ways = {row["way"] for row in rows if row["program"] == "cpu"}
    assert ways == ({"forward", "both"} if benchmark.backward else {"forward"})
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert speed_of_ops.run(harness.Results("ops", options), name, shape, options) == rows
    assert "left out" not in capfd.readouterr().out
    shapes = [len(shape) for shape in (benchmark.sweep(16), *benchmark.shapes, TINY.get(name, (2, 16, 2, 8)))]
    assert len(set(shapes)) == 1


@pytest.mark.parametrize("name", ["weighted_average", "linear_attention-decode"])
def test_tables_and_pictures(name, monkeypatch, tmp_path, capfd):
    shape = TINY[name]
    sweep = (lambda n: (n, *shape[1:])) if name.endswith("decode") else (lambda n: (1, n, *shape[2:]))
    small = peers.BENCHMARKS[name]._replace(shapes=(shape,), lengths=(1, 3), sweep=sweep)
    monkeypatch.setitem(peers.BENCHMARKS, name, small)
    monkeypatch.setattr(sys, "argv", ["ops.py", name, "--rounds", "1", "--results", str(tmp_path)])
    speed_of_ops.main()
    rows = [row["shape"] for row in csv.DictReader((tmp_path / "ops.csv").read_text().splitlines())]
    assert set(rows) == {str(sweep(2)), str(sweep(8)), str(shape)}
    assert (tmp_path / f"{name}-cpu.png").stat().st_size > 0


def test_a_row_names_the_machine_and_a_run_resumes_from_its_folder(options, monkeypatch):
    first = harness.Results("few", options)
    added = first.add(name="a", score=1 / 3)
    first.add(name="b", more=2)
    assert added["score"] == "0.33333"
    assert added["machine"] == harness.machine()
    assert f"torch {torch.__version__}" in added["versions"]
    assert float(added["load"]) >= 0
    columns = first.path.read_text().splitlines()[0].split(",")
    assert columns == ["name", "score", "more", "machine", "threads", "load", "date", "versions"]
    second = harness.Results("few", options)
    assert second.rows[0] == {**added, "more": ""}
    assert second.has(name="a")
    assert second.timed(name="a")
    assert not second.has(name="c")
    monkeypatch.setattr(harness, "machine", lambda device: "another")
    assert not second.timed(name="a")
    options.again = True
    third = harness.Results("few", options)
    assert not third.has(name="a")
    third.add(name="a", score=1 / 3)
    assert third.has(name="a")


def test_medians_are_of_runs_in_turns():
    """A short call is repeated within a run; a slow one is run once after the first."""
    order = []
    calls = {"short": lambda: order.append("short"), "slow": lambda: order.append("slow") or time.sleep(0.02)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "SLOW", 0.01)
        took = harness.measure(calls, 3)
    assert order.count("slow") == 2
    assert order.count("short") > 100
    assert took["slow"].seconds > 0.02 > took["short"].seconds
    assert took["slow"].processor < 0.02


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["linear"], "unknown name 'linear'; known: a, b"),
        (["--device", "cuda"], "invalid choice: 'cuda'"),
        (["--rounds", "x"], "invalid int value"),
    ],
)
def test_options_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", *words])
    with pytest.raises(SystemExit):
        harness.parse(harness.parser("", ["a", "b"], rounds=1))
    assert message in capsys.readouterr().err


def test_every_op_of_a_gpu_is_timed():
    timed = {benchmark.op for benchmark in peers.BENCHMARKS.values()}
    assert {op.name for op in registry.declared() if "triton" in op.backends} <= timed


@pytest.mark.parametrize(("words", "count"), [([], 3), (["--first"], 1)])
def test_the_first_configuration_of_a_gpu(words, count, monkeypatch, tmp_path):
    """`--first` leaves one of the configurations that a kernel would measure."""
    pytest.importorskip("triton", reason="triton is not installed")
    from scanl.ops._triton import _tuned

    measured = []

    def autotune(configs, key, **options):
        return lambda kernel: options["prune_configs_by"]["early_config_prune"](configs, {}, K=64)

    def run(*_, **__):
        measured.append(_tuned.tuned(["a", "b", "c"], ["K"])(argparse.Namespace(arg_names=["K"])))

    monkeypatch.setattr(_tuned, "IS_INTERPRETER", False)
    monkeypatch.setattr(_tuned, "_worth_measuring", _tuned._worth_measuring)  # the program replaces it
    monkeypatch.setattr(_tuned.triton, "autotune", autotune)
    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "ceilings", lambda *_: None)
    monkeypatch.setattr(harness, "machine", lambda device: "a device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "linear_scan", "--quick", "--results", str(tmp_path), *words])
    gpu.main()
    assert measured == [["a", "b", "c"][:count]]


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


def test_a_wrong_peer_is_left_out(monkeypatch, options, capfd):
    def wrong(*operands):
        return peers.contender(lambda q, k, v: 2 * v, *operands[:3], operands[-1])

    benchmark = peers.BENCHMARKS["linear_attention"]
    pair = {"wrong": peers.Peer(wrong, ("cpu",)), "another": peers.Peer(wrong, ("cpu",), same=False)}
    monkeypatch.setitem(peers.BENCHMARKS, "linear_attention", benchmark._replace(peers=pair))
    results = harness.Results("ops", options)
    rows = speed_of_ops.run(results, "linear_attention", (2, 16, 2, 8), options, only=("cpu",))
    assert {row["program"] for row in rows} == {"floor", "cpu", "another"}
    assert "wrong: left out: AssertionError" in capfd.readouterr().out


def test_half_precision_agrees_by_its_norm():
    right = torch.randn(1000).bfloat16()
    speed_of_ops.agree(right + 0.01 * torch.randn(1000), right)
    with pytest.raises(AssertionError, match="of the output's norm"):
        speed_of_ops.agree(right + 0.1 * torch.randn(1000), right)


def test_bytes_of_the_floor():
    q, dy = torch.zeros(4, dtype=torch.float32), torch.zeros(2, dtype=torch.float32)
    assert peers.moved(q, None, q, dy) == (40, 112)  # in, out; and again, with dy, and as many gradients
    floor = peers.copy(q, None, q, dy)
    assert (floor.forward, floor.both) == (40, 112)
    assert floor.call().nbytes == 20  # read and written


def test_ratios_are_to_the_base(options):
    took = {("triton", "both"): (2.0, 1.0), ("fla", "both"): (3.0, 2.0), ("fla", "forward"): (1.0, 1.0)}
    took = {key: harness.Took(*value) for key, value in took.items()}
    rows = harness.Results("gpu", options).record(took, "triton", name="op")
    assert [row.get("ratio") for row in rows] == ["1", "1.5", None]
    assert [row.get("processor_ratio") for row in rows] == ["1", "2", None]


def test_layers_of_the_picture_of_tasks(tmp_path):
    """The rows are grouped by family."""
    rows = harness.Results("tasks").of(setting="short")
    groups = tasks.grouped(["lru", "gru", "s4", "elman"])
    assert groups == {"rnn": ["elman", "gru"], "ssm": ["lru", "s4"]}
    tasks.draw(rows, tmp_path / "tasks.png")
    assert (tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
@pytest.mark.parametrize("program", [gpu, speed_of_ops], ids=["gpu", "ops"])
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
    monkeypatch.setattr(seen_to_learn, "FOLDER", tmp_path / "runs")
    monkeypatch.setattr(seen_to_learn, "scanl", scanl)
    monkeypatch.setitem(seen_to_learn.SEEN, "tiny", row)
    monkeypatch.setattr(sys, "argv", ["seen_to_learn.py", "tiny", "--results", str(tmp_path)])
    for trained in (2, 0):  # the second time both scores are recorded
        assert seen_to_learn.main() == 1
        *rows, verdict = capfd.readouterr().out.splitlines()
        assert len(rows) == trained
        assert verdict == "tiny: the claim does not hold"
    rows = list(csv.DictReader((tmp_path / "seen_to_learn.csv").read_text().splitlines()))
    assert [(row["layer"], row["options"]) for row in rows] == [("elman", "--lr 1e-2"), ("lru", "--lr 1e-3")]
    assert all(float(row["score"]) > 0 for row in rows)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tiny-elman-1-1", "tiny-lru-1-1"}


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
def test_when_a_comparison_holds(task, reached, missed, ours, theirs, held, options, monkeypatch):
    scores = iter([*ours, *theirs])
    monkeypatch.setattr(seen_to_learn, "trained", lambda *args: next(scores))
    sides = (
        seen_to_learn.Side(layer, tuple(f"--lr {n}" for n in range(len(scores_of))))
        for layer, scores_of in (("lem", ours), ("lstm", theirs))
    )
    results = harness.Results("seen_to_learn", options)
    assert seen_to_learn.Beside(task, ("",), *sides, reached, missed).run("name", results) == held


def test_a_claim_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, options, capfd):
    """The first run is interrupted in its second stage."""
    monkeypatch.setattr(memory_claims, "FOLDER", tmp_path)
    commands, scores = [], {"lru": "0.9", "elman": "0.5"}

    def scanl(command, *arguments):
        folder = Path(arguments[0] if command == "eval" else arguments[-1])
        commands.append((command, folder.name, *({"--init", "--resume"} & {*arguments})))
        if command == "eval":
            return f"  this model  {scores[folder.name.split('-')[1]]}\n"
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").touch()
        if len(commands) == 2:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(memory_claims, "scanl", scanl)
    runs = tuple(memory_claims.Run(layer, stages) for layer, stages in (("lru", ("", "--lr 1")), ("elman", ("",))))
    claim, results = memory_claims.Claim("copy", runs, "--count 3", 0.9, 0.6), harness.Results("memory_claims", options)
    with pytest.raises(KeyboardInterrupt):
        claim.show("a", results)
    spent = memory_claims.minutes(tmp_path / "a-lru.json")
    assert claim.show("a", results)
    assert commands == [
        ("train", "a-lru-1"), ("train", "a-lru-2", "--init"), ("train", "a-lru-1", "--resume"),
        ("train", "a-lru-2", "--resume"), ("eval", "a-lru-2"), ("train", "a-elman-1"), ("eval", "a-elman-1"),
    ]  # fmt: skip
    assert spent[0] < float(results.of(name="a", layer="lru")[0]["minutes"])
    assert claim.show("a", harness.Results("memory_claims", options))
    assert len(commands) == 7
    assert not claim._replace(reached=0.91).show("a", results)
    assert not claim._replace(missed=0.5).show("a", results)


def test_the_mackey_glass_series_is_generated_freely(monkeypatch, options, capfd):
    sizes = seen_to_learn.Sizes(units=60, washout=100, fitted=600, starts=3, apart=20, seeds=1)
    x = seen_to_learn.series(900)
    slope = 0.2 * (x[:-17] + 1) / (1 + (x[:-17] + 1) ** 10) - 0.1 * (x[17:] + 1)
    torch.testing.assert_close(x[18:] - x[17:-1], slope[:-1], rtol=0, atol=0.02)  # one step of Euler's method
    starts = torch.stack([x[600:700], x[650:750]])
    answers = seen_to_learn.reservoir(x[:600], starts, 0, sizes)
    alone = seen_to_learn.reservoir(x[:600], starts[1:], 0, sizes)
    torch.testing.assert_close(answers[1:], alone, rtol=0, atol=1e-9)
    assert answers.shape == (2, 84)
    assert (answers[:, 0] - x[[700, 750]]).abs().max() < 1e-3 < (x[[700, 750]] - x[[699, 749]]).abs().max()
    assert (answers[:, 19] - x[[719, 769]]).abs().max() < 0.02
    monkeypatch.setattr(seen_to_learn, "find_spec", lambda name: None)
    monkeypatch.setattr(seen_to_learn, "Sizes", lambda: sizes)
    results = harness.Results("seen_to_learn", options)
    assert seen_to_learn.Forecast(float("inf")).run("name", results)
    assert not seen_to_learn.Forecast(0.0).run("name", results)
    assert "reservoirpy is not installed" in capfd.readouterr().out


@pytest.mark.parametrize(("beside", "held"), [([0.3, 0.1, 0.1], False), ([0.1, 0.2, 0.3], True)])
def test_the_reservoir_is_not_worse_than_that_of_reservoirpy(beside, held, options, monkeypatch):
    scores = {seen_to_learn.reservoir: [0.15, 0.9, 0.1], seen_to_learn.reservoirpy: beside}
    monkeypatch.setattr(seen_to_learn, "find_spec", lambda name: name)
    monkeypatch.setattr(seen_to_learn, "Sizes", lambda: argparse.Namespace(seeds=3))
    monkeypatch.setattr(seen_to_learn, "nrmse", lambda sizes, generate, seed: scores[generate][seed])
    results = harness.Results("seen_to_learn", options)
    assert seen_to_learn.Forecast(0.2).run("name", results) == held
    assert not seen_to_learn.Forecast(0.15).run("name", results)


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


def test_layers_are_timed_beside_the_lstm(options):
    results = harness.Results("layers", options)
    speed_of_layers.run(results, "gru", (2, 8, 16), 1)
    ratios = {row["program"]: float(row["ratio"]) for row in results.rows}
    assert ratios["torch.nn.LSTM"] == 1
    assert ratios["gru"] > 0


def test_a_stream_is_read_by_all_learners(monkeypatch, tmp_path, capfd):
    """The naive learner's score is that of the last truths, after the beginning."""
    pytest.importorskip("river", reason="river is not installed: pip install 'scanl[online]'")
    pytest.importorskip("statsmodels", reason="statsmodels is not installed: pip install 'scanl[statsmodels]'")
    from quality import online

    monkeypatch.setattr(online, "QUICK", 12)
    monkeypatch.setattr(online, "BEGINNING", 3)
    monkeypatch.setattr(sys, "argv", ["online.py", "sunspots", "--quick", "--results", str(tmp_path)])
    online.main()
    with (tmp_path / "quick" / "online.csv").open() as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    assert {row["family"] for row in rows.values()} == {"naive", "recurrent", "linear", "tree"}
    numbers = [y for _, y in itertools.islice(online.of_table("sunspots", "SUNACTIVITY"), 12)]
    errors = [abs(b - a) for a, b in itertools.pairwise(numbers[2:])]
    assert float(rows["last truth"]["score"]) == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_a_stream_of_the_benchmark_of_memory_asks_for_the_sign_that_it_has_shown():
    from quality.online_memory import DELAY, Streams

    batch = Streams(rows=5, seed=0).block(200)
    for inputs, answers in zip(batch.inputs, batch.targets[..., 0], strict=True):
        requests = answers.isfinite().nonzero()[:, 0]
        assert (inputs[requests, 1] == 1).all()
        later = requests[requests >= DELAY]
        assert len(later) > 3
        assert torch.equal(inputs[later - DELAY, 0], answers[later])

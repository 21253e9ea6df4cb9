"""`scanl learn`: what it reads, refuses and writes, and that it goes on to the bit."""

import csv
import errno
import gc
import io
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from forked import begun

pytest.importorskip("river", reason="river is not installed: pip install 'scanl[online]'")

import river.datasets

from scanl.cli import main
from scanl.cli.learn import parse
from scanl.errors import CheckpointError, DataError
from scanl.learning.online import reading
from scanl.learning.online.columns import StreamColumns
from scanl.learning.online.config import StreamConfig
from scanl.learning.online.folder import OnlineFolder, RowFile
from scanl.learning.online.reading import Form, lines_of, rows
from scanl.learning.online.run import OnlineRun

COVERS = [
    "learning/online/columns",
    "learning/online/config",
    "learning/online/folder",
    "learning/online/late",
    "learning/online/reading",
    "learning/online/run",
    "learning/online/stream",
]
TINY = ["--dim", "4", "--channel-mixer", "none"]


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def learn(*argv):
    assert main(["learn", *map(str, argv), *TINY]) == 0


@pytest.fixture
def series(tmp_path):
    path = tmp_path / "series.txt"
    path.write_text("\n".join(str(math.sin(0.3 * t)) for t in range(60)) + "\n")
    return path


def test_numbers_are_predicted_one_ahead(series, tmp_path, capsys):
    out = tmp_path / "run"
    learn(series, "--out", out, "--score-every", 20)
    rows = table(out / "predictions.csv")
    assert [(row["sample"], row["line"]) for row in rows] == [(str(t), str(t + 1)) for t in range(60)]
    errors = [abs(float(row["prediction"]) - math.sin(0.3 * (t + 1))) for t, row in enumerate(rows[:-1])]
    scores = table(out / "scores.csv")
    assert [row["sample"] for row in scores] == ["19", "39", "59"]
    assert float(scores[0]["MAE"]) == pytest.approx(sum(errors[:20]) / 20)
    printed = capsys.readouterr().out
    assert "60 samples, 59 scored" in printed
    assert f"{sum(errors) / 59:.4g}" in printed


@pytest.mark.parametrize("count", [0, 3])
def test_what_the_caller_has_frozen_stays_frozen(count, series, monkeypatch):
    """Or every collection after it walks through the caller's objects, too."""
    called = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count)
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: called.append(name))
    learn(series, "--samples", 3)
    assert called == ([] if count else ["collect", "freeze", "unfreeze"])


def test_the_default_options_beat_the_last_value(tmp_path, capsys):
    path = tmp_path / "waves.txt"
    path.write_text("\n".join(str(math.sin(0.5 * t)) for t in range(150)))
    assert main(["learn", str(path), "--window", "50"]) == 0
    scores = dict(line.rsplit(None, 1) for line in capsys.readouterr().out.splitlines()[1:])
    assert float(scores["  MAE window"]) < 0.8 * float(scores["  MAE naive"])


def test_a_table_of_numbers_and_one_of_classes(tmp_path, capfd):
    path = tmp_path / "table.csv"
    path.write_text("a,b,word,y\n" + "".join(f"{t % 3},{t % 5},x,{t % 2}\n" for t in range(20)))
    learn(path, "--target", "y", "--out", tmp_path / "numbers")
    assert "text is not read: word" in capfd.readouterr().err
    learn(path, "--target", "y", "--question", "class", "--out", tmp_path / "classes")
    out = capfd.readouterr().out
    assert "Accuracy" in out
    (first, second, *_, last) = table(tmp_path / "classes" / "predictions.csv")
    assert (first["prediction"], second["prediction"]) == ("", "0")
    assert last["prediction"] in "01"
    assert 0.5 <= float(last["probability"]) <= 1


def test_a_horizon_reads_the_target_too(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,y\n" + "".join(f"{t},{t * 2}\n" for t in range(20)))
    config, _ = parse([str(path), "--target", "y", "--horizon", "3", *TINY])
    run = OnlineRun(config, None, print)
    run.learn()
    assert run.stream.columns.names == ["y", "a"]
    assert (run.loop.count, run.scored, len(run.late.ahead)) == (20, 17, 3)
    assert run.loop.bank.learners[0].model.inputs.channels == 2  # the last truth is among the inputs already


def test_objects_with_truths_of_their_own_lines(tmp_path, capfd):
    lines = []
    for t in range(12):
        lines.append({"id": t, "x": math.sin(t)})
        if t >= 2:
            lines.append({"id": t - 2, "y": math.cos(t)})
    path = tmp_path / "objects.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    learn(path, "--target", "y", "--key", "id")
    assert "12 samples, 10 scored" in capfd.readouterr().out


def test_a_sample_has_its_name_in_several_columns():
    lines = [b'{"a": "x, y", "b": 1, "u": 1}', b'{"a": "x", "b": "y, 1", "u": 2}', b'{"a": "x, y", "b": 1, "y": 3}']
    first, *more = rows(lines, 0, Form())
    columns = StreamColumns.of(first, StreamConfig(target="y", key="a, b", question="number"))
    keys = [columns.item(row).key for row in (first, *more)]
    assert (columns.names, keys) == (["u"], ["'x, y', 1", "x, 'y, 1'", "'x, y', 1"])
    with pytest.raises(DataError, match="line 1: column 'b' is missing, expected the name of a sample"):
        columns.item(first._replace(values={"a": "x", "u": 1}))


def test_a_mark_of_the_byte_order_a_second_line_of_names_and_a_missing_number():
    first, second = rows([b"\xef\xbb\xbfa,y\n", b"1,2\n", b"a,y\n", b"NA,3\n"], 0, Form())
    columns = StreamColumns.of(first, StreamConfig(target="y"))
    item = columns.item(second)
    assert (columns.names, item.number, item.truth) == (["a"], 4, 3.0)
    assert math.isnan(item.inputs[0])


def test_a_sample_beyond_those_that_may_wait_is_given_up(tmp_path):
    path = tmp_path / "objects.jsonl"
    path.write_text("".join(f'{{"id": {t}, "x": {t}, "y": null}}\n' for t in range(5)))
    config, _ = parse([str(path), "--target", "y", "--key", "id", "--question", "number", "--waiting", "2", *TINY])
    run = OnlineRun(config, None, print)
    run.learn()
    assert list(run.late.keys) == [3, 4]
    assert run.loop.given_up == 3


def test_standard_input(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1\n2\n3\n")))
    learn("-")
    assert "3 samples, 2 scored" in capfd.readouterr().out


def test_streams_by_name(capfd):
    learn("--data", "copy_online", "--data-options.pattern", 2, "--data-options.delay", 1, "--samples", 24)
    assert "24 samples, 8 scored" in capfd.readouterr().out
    learn("river:Phishing", "--samples", 10)
    assert "10 samples, 10 scored" in capfd.readouterr().out


def test_a_bank_names_the_rate_that_answered(series, tmp_path, capfd):
    learn(series, "--out", tmp_path / "run", "--lr", "0.0", "0.01")
    assert "best rate" in capfd.readouterr().out
    assert {row["rate"] for row in table(tmp_path / "run" / "predictions.csv")} <= {"0.0", "0.01"}


def test_the_delay_hides_truths(series):
    config, _ = parse([str(series), "--delay", "5", *TINY])
    run = OnlineRun(config, None, print)
    run.learn()
    assert (run.scored, len(run.late.hidden)) == (54, 5)


BAD = [
    ("1\n2\nx\n4\n", [], "line 3: it is 'x', expected a number"),
    ("a,y\n1,2\n1\n", ["--target", "y"], "line 3: it has 1 fields, expected 2"),
    ("a,y\n1,2\nx,2\n", ["--target", "y"], "line 3: column 'a' is 'x', expected a finite number"),
    ("a,y\n1,2\n1,inf\n", ["--target", "y"], "line 3: column 'y' is 'inf', expected a finite number"),
    ('{"a": 1, "y": 2}\n{"y": 2}\n', ["--target", "y"], "line 2: column 'a' is missing"),
    ('{"a": 1, "y": 2}\n{"a": 2}\n', ["--target", "y"], "line 2: column 'y' is missing"),
    ('{"a": 1, "y": 2}\n[1]\n', ["--target", "y"], "line 2: it is '[1]', expected an object"),
    ('{"a": 1, "y": 2}\n{"a"\n', ["--target", "y"], "line 2: "),
    ("1\n2\n\xff\n", [], "line 3: "),
    ('{"id": 1, "a": 1}\n{"id": 2, "y": 1}\n', ["--target", "y", "--key", "id"], "line 2: no sample 2 waits"),
]


@pytest.mark.parametrize(("text", "options", "message"), BAD)
def test_a_bad_line_stops_or_is_skipped(tmp_path, capfd, text, options, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(text.encode("latin-1"))
    argv = ["learn", str(path), *options, *TINY]
    assert main([*argv, "--out", str(tmp_path / "stop")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"scanl: learn: {message}"), line
    assert line.endswith("correct it, or give --on-error skip")
    stored = OnlineFolder.open(tmp_path / "stop").stored()  # the learner as it was before the line
    assert stored["counts"][0] == int(message.split()[1][:-1]) - 1
    assert main([*argv, "--on-error", "skip"]) == 0
    out, err = capfd.readouterr()
    assert message in err
    assert "skipped lines" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "data is none, expected a stream"),
        (["copy_onlin"], "unknown stream 'copy_onlin'; did you mean 'copy_online'?"),
        (["no/such.csv"], "which does not exist"),
        (["river:Phish"], "unknown data set of river 'Phish'; did you mean 'Phishing'?"),
        (["series.txt", "--lr", "-1"], "lr is [-1.0], expected rates of at least 0"),
        (["series.txt", "--on-error", "ask"], "unknown on_error 'ask'"),
        (["series.txt", "--drift", "adwi"], "did you mean 'adwin'?"),
        (["series.txt", "--metrics", "MEA"], "unknown metric of river 'MEA'"),
        (["-", "--follow"], "follow is given with -, expected a file"),
        (["series.txt", "--key", "id", "--delay", "2"], "key is given with horizon or delay"),
        (["series.txt", "--target", "z"], "unknown column 'z'"),
        (["--resume", "nothing"], "nothing has no config.yaml"),
    ],
)
def test_bad_options(series, monkeypatch, capfd, argv, message):
    monkeypatch.chdir(series.parent)
    assert main(["learn", *argv]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line


def test_no_one_else_writes_to_the_folder(series, tmp_path, capfd):
    learn(series, "--out", tmp_path / "run")
    assert main(["learn", str(series), "--out", str(tmp_path / "run"), *TINY]) == 2
    assert "is in use" in capfd.readouterr().err


def test_another_option_is_refused_when_resumed(series, tmp_path, capfd):
    learn(series, "--out", tmp_path / "run")
    assert main(["learn", "--resume", str(tmp_path / "run"), "--lr", "0.5"]) == 2
    assert "lr is [0.5], expected [0.001] because of the run to resume" in capfd.readouterr().err


def test_a_table_is_cut_to_its_size_in_the_checkpoint(tmp_path):
    path = tmp_path / "table.csv"
    before = RowFile(path, ["a"], None)
    before.append([1])
    size = before.settle()
    before.append([2])
    before.close()
    RowFile(path, ["a"], size).close()
    assert path.read_text() == "a\n1\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
def test_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "full.csv").symlink_to("/dev/full")
    rows = RowFile(tmp_path / "full.csv", ["a"], None)
    for call in (rows.flush, rows.close):
        with pytest.raises(CheckpointError, match=r"full.csv cannot be written: No space left"):
            call()


class Filling:
    """A file on a disk that is full after 30 lines."""

    def __init__(self, file):
        self.file, self.left = file, 30

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, line):
        self.left -= 1
        return self.file.write(line) if self.left >= 0 else no_space()

    def close(self):
        self.file.close()
        if self.left < 0:
            no_space()


def no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("file", ["predictions.csv", "checkpoint.ckpt"])
def test_a_run_whose_disk_fills_up_goes_on_to_the_bit_once_there_is_space(file, series, tmp_path, monkeypatch, capfd):
    learn(series, "--out", tmp_path / "whole", "--score-every", 10)
    run, replace, opened = tmp_path / "run", os.replace, RowFile.__init__
    writes = iter(range(30))

    def filling(rows, *arguments):
        opened(rows, *arguments)
        if rows.path.name == file:
            rows._file = Filling(rows._file)

    with monkeypatch.context() as full:
        full.setattr(RowFile, "__init__", filling)
        full.setattr(os, "replace", lambda a, b: replace(a, b) if b.name != file or next(writes, 0) else no_space())
        next(writes)
        command = ["learn", str(series), "--out", str(run), "--score-every", "10", "--save-seconds", "0", *TINY]
        assert main(command) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert f"{file} cannot be written: No space left on device" in error
    assert {path.name for path in run.iterdir()} == {"config.yaml", "predictions.csv", "scores.csv", "checkpoint.ckpt"}
    assert 25 < OnlineFolder.open(run).stored()["counts"][0] < 31
    assert main(["learn", "--resume", str(run)]) == 0
    for name in ("predictions.csv", "scores.csv"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


STREAMS = {
    "class": ["--question", "class", "--target", "y", "--drift", "kswin"],
    "plain": ["--block", "3", "--delay", "2", "--drift", "adwin"],
    "bank": ["--lr", "0.01", "0.001", "--window", "7"],
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_run_goes_on_to_the_bit(name, series, tmp_path):
    """Ended after 25 samples, and then by a line that is cut out again."""
    options = [*STREAMS[name], "--score-every", "4"]
    if name == "class":
        series.write_text("x,y\n" + "".join(f"{math.sin(t)},{'ab'[t % 3 == 0]}\n" for t in range(60)))
    learn(series, "--out", tmp_path / "whole", *options)
    learn(series, "--out", tmp_path / "parts", *options, "--samples", 25)
    with (tmp_path / "parts" / "predictions.csv").open("a") as file:
        file.write("25,26,0.5\nhalf a li")  # after the checkpoint
    assert main(["learn", "--resume", str(tmp_path / "parts"), "--samples", "40"]) == 0
    assert main(["learn", "--resume", str(tmp_path / "parts"), "--samples", "1000"]) == 0
    for file in ("predictions.csv", "scores.csv"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_a_killed_run_goes_on_to_the_bit(series, tmp_path):
    """SIGKILL while it waits at the end of a file that grows; the rest of the file comes later."""
    lines = series.read_bytes().splitlines(keepends=True)
    learn(series, "--out", tmp_path / "whole", "--score-every", 10)
    series.write_bytes(b"".join(lines[:30]))
    killed = tmp_path / "killed"
    words = ["--follow", "--save-seconds", "0", "--score-every", "10", *TINY]
    process = begun("learn", series, "--out", killed, *words)
    try:
        limit = time.monotonic() + 100
        while not (killed / "checkpoint.ckpt").exists():
            assert process.is_alive()
            assert time.monotonic() < limit
            time.sleep(0.02)
    finally:
        process.kill()
        process.join()
    series.write_bytes(b"".join(lines))
    assert main(["learn", "--resume", str(killed), "--follow", "false"]) == 0
    for file in ("predictions.csv", "scores.csv"):
        assert (killed / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_a_signal_ends_a_run_with_a_checkpoint(series, tmp_path, monkeypatch, capfd):
    take = OnlineRun._take

    def interrupted(self, item):
        take(self, item)
        if item.number == 10:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(OnlineRun, "_take", interrupted)
    assert main(["learn", str(series), "--out", str(tmp_path / "run"), *TINY]) == 130
    assert "interrupted; saved" in capfd.readouterr().err
    assert OnlineFolder.open(tmp_path / "run").stored()["counts"][0] == 10


def test_drifts_are_kept_by_a_resumed_run(series, tmp_path):
    learn(series, "--out", tmp_path / "run", "--samples", 3)
    folder = OnlineFolder.open(tmp_path / "run")
    run = OnlineRun(folder.config(), folder, print)
    run.drifts.append(2)
    run._save()
    resumed = OnlineRun(folder.config(), folder, print)
    for table in (*run.tables, *resumed.tables):
        table.close()
    assert resumed.drifts == [2]


def test_a_run_without_replay_goes_on_with_new_lines(series, tmp_path, capfd):
    learn(series, "--out", tmp_path / "run")
    more = tmp_path / "more.txt"
    more.write_text("0.1\n0.2\n")
    assert main(["learn", str(more), "--resume", str(tmp_path / "run"), "--replayed", "false"]) == 0
    assert "62 samples, 61 scored" in capfd.readouterr().out


def test_the_truths_of_a_class_are_bounded(tmp_path):
    path = tmp_path / "many.csv"
    path.write_text("a,y\n" + "".join(f"{t},c{t}\n" for t in range(5)))
    config, _ = parse([str(path), "--target", "y", "--classes", "3", *TINY])
    with pytest.raises(DataError, match="a class beyond the 3 of before"):
        OnlineRun(config, None, print).learn()


class Runs:
    def __reduce__(self):
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["scores"], torch.tensor([1], dtype=torch.uint8)),  # as a version with objects of river had them
        (["scores", "metrics"], [1, 2]),
        (["kind"], [False, 1, 10**12]),
        (["kind"], [False, 10**12, 1]),
        (["classes"], "x"),
        (["counts"], [1, 2]),
        (["columns"], {"target": 1}),
        (["form"], {"other": 1}),
        (["sizes"], [-1, "x"]),
        (["hidden"], [[1]]),
        (["loop", "queue"], [[0, torch.ones(1, 1, 9), [1.0], 0, [[0.0], [1.0], None], None]]),
        (["loop", "kind", "innovation"], {"mean": "x"}),
        (["loop", "bank", "sums"], []),
        (["loop", "bank", "learners", 0, "state"], {}),
        (["loop"], None),
    ],
)
def test_a_checkpoint_of_another_form_is_one_line(path, value, tmp_path, stored_run, capfd):
    """With a right digest: the file was written by one who can seal it."""
    folder = OnlineFolder.open(shutil.copytree(stored_run, tmp_path / "run"))
    state = folder.stored()
    *before, last = path
    part = state
    for name in before:
        part = part[name]
    part[last] = value
    folder.save(state)
    capfd.readouterr()
    assert main(["learn", "--resume", str(folder.path)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "checkpoint" in line


@pytest.fixture(scope="module")
def stored_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    (folder / "series.txt").write_text("\n".join(map(str, range(9))))
    learn(folder / "series.txt", "--out", folder / "run", "--samples", 5)
    return folder / "run"


def test_a_checkpoint_with_an_object_is_not_opened(tmp_path, stored_run, capfd):
    folder = OnlineFolder.open(shutil.copytree(stored_run, tmp_path / "run"))
    folder.save(folder.stored() | {"scores": Runs()})
    assert main(["learn", "--resume", str(folder.path)]) == 2
    out, err = capfd.readouterr()
    assert "it ran" not in out
    assert err.count("\n") == 1


ODD = [
    (b"[" * 100_000, "expected an object of JSON"),
    (b'{"x":' * 100_000, "its brackets are too deep"),
    (b'{"x": ' + b"[" * 500 + b"]" * 500 + b', "y": 1}', "column 'x' is a list, expected a finite number"),
    (b'{"x": 1' + b"0" * 400 + b', "y": 1}', "column 'x' is 1000"),
    (b'{"x": 1' + b"0" * 5000 + b', "y": 1}', "line 2: "),
    (b'{"x": 1e999, "y": 1}', "column 'x' is inf, expected a finite number"),
    (b'{"x": -Infinity, "y": 1}', "column 'x' is -inf, expected a finite number"),
    (b'{"x": 1, "x": 2, "y": 1}', "it has 'x' twice"),
    (b'{"x": "\xff", "y": 1}', "invalid start byte"),
    (b'{"x": "\\ud800", "y": 1}', "surrogates not allowed"),
    (b'{"x": 1, "y": 1\x00}', "line 2: "),
    (b'{"x": 1, "y": "' + b"a" * 2**24 + b'"}', "it has more than 16,777,216 bytes"),
    (b'{"x": "' + b"a" * 2**20 + b'", "y": 1}', "column 'x' is 'aaa"),
    (b'{"x": 1, "y": []}', "column 'y' is a list"),
]


@pytest.mark.parametrize("line", range(len(ODD)))
def test_an_odd_line_of_json_is_one_line(line):
    bad, message = ODD[line]
    lines = [b'{"x": 1, "y": 1}\r\n', bad + b"\r\n", b'\xef\xbb\xbf{"x": NaN, "y": NaN}\r\n']
    columns = StreamColumns("y", None, [], ["x"])
    first, second, third = rows(lines_of(io.BytesIO(b"".join(lines))), 0, Form())
    if not isinstance(second, DataError):
        with pytest.raises(DataError) as raised:
            columns.item(second)
        second = raised.value
    assert message in str(second)
    assert len(str(second)) < 200
    items = [columns.item(row) for row in (first, third)]
    assert [item.truth for item in items] == [1.0, None]
    assert math.isnan(items[1].inputs[0])


@pytest.mark.parametrize("key", ["[1]", "{}", "NaN", "null"])
def test_a_key_is_a_name_or_a_number(key):
    row = next(rows([b'{"id": %s, "x": 1, "y": 1}' % key.encode()], 0, Form()))
    with pytest.raises(DataError, match="line 1: column 'id' is"):
        StreamColumns("y", None, ["id"], ["x"]).item(row)


def test_a_stream_of_json_goes_on_to_the_bit(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps({"x": math.sin(t), "y": math.cos(t)}) + "\n" for t in range(12)))
    learn(path, "--target", "y", "--out", tmp_path / "whole")
    learn(path, "--target", "y", "--out", tmp_path / "parts", "--samples", 5)
    assert main(["learn", "--resume", str(tmp_path / "parts"), "--samples", "99"]) == 0
    for file in ("predictions.csv", "scores.csv"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


@pytest.mark.parametrize("options", [["--delay", "3"], ["--horizon", "2", "--delay", "2"], ["--horizon", "4"]])
def test_a_truth_that_always_comes_too_late_is_refused(options, series, capfd):
    assert main(["learn", str(series), *options, "--waiting", "3", *TINY]) == 2
    assert "waiting is 3, expected at least 4 because of horizon and delay" in capfd.readouterr().err


def test_a_truth_may_come_as_late_as_waiting_says(series):
    config, _ = parse([str(series), "--delay", "2", "--waiting", "3", *TINY])
    run = OnlineRun(config, None, print)
    run.learn()
    assert (run.scored, run.loop.given_up) == (57, 0)


def test_truths_that_come_too_late_are_counted(tmp_path, capfd):
    """Sample 0 waits; those behind it have their truths, and wait for their turn: the queue is full by them."""
    path = tmp_path / "late.jsonl"
    lines = [{"id": t, "x": t, "y": t if t else None} for t in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"id": 0, "y": 1}, {"id": 9, "x": 1, "y": 1}]))
    learn(path, "--target", "y", "--key", "id", "--question", "number", "--waiting", 2)
    out, err = capfd.readouterr()
    assert "6 samples, 5 scored" in out
    assert "truths that came too late  1" in out
    assert "line 6: the truth of 0 comes too late" in err


def followed(path, monkeypatch, *changes):
    """Return the lines that are read of a file, while `changes` happen, one at each wait; the last wait ends it."""
    waits, begun = iter(changes), []

    def wait(seconds):
        try:
            next(waits)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(reading.time, "sleep", wait)
    lines = []

    def read():
        for line in reading.followed_lines(path, begun.append):
            lines.append(line.decode().strip())

    with pytest.raises(KeyboardInterrupt):
        read()
    return lines, begun


def test_a_file_that_is_cut_or_replaced_is_followed_from_its_begin(tmp_path, monkeypatch):
    path = tmp_path / "log"

    def appended(text):
        with path.open("a") as file:
            file.write(text)

    def replaced():
        path.rename(tmp_path / "log.1")
        path.write_text("7\n")

    path.write_text("1\n2\n")
    changes = [
        lambda: appended("3"),
        lambda: appended("3\n4"),  # half a line, and then the file is cut
        lambda: path.write_text("5\n"),
        lambda: path.write_text("a longer file than before\n6\n"),
        replaced,
        path.unlink,
        lambda: path.write_text("8\n"),
        lambda: None,
    ]
    lines, begun = followed(path, monkeypatch, *changes)
    assert lines == ["1", "2", "33", "4", "5", "a longer file than before", "6", "7", "8"]
    assert begun == [4, 5, 7, 8]


def test_a_run_whose_file_was_cut_goes_on_with_its_new_lines(tmp_path, capfd):
    path = tmp_path / "log"
    path.write_text("1\n2\n3\n")
    learn(path, "--out", tmp_path / "run")
    path.write_text("4\n")
    assert main(["learn", "--resume", str(tmp_path / "run")]) == 2
    assert "has fewer than the 3 lines that were read before" in capfd.readouterr().err
    config, folder = parse(["--resume", str(tmp_path / "run"), "--follow", "true", "--samples", "4"])
    run = OnlineRun(config, folder, print)
    run.learn()
    assert (run.stream.lines, run.stream.before, run.loop.count) == (4, 3, 4)


def test_a_feature_that_vanishes_from_a_data_set_of_river_is_missing(monkeypatch, capfd):
    class Changing(river.datasets.base.Dataset):
        def __init__(self):
            super().__init__(n_features=2, task="Regression")

        def __iter__(self):
            yield from [({"a": 1.0, "b": None}, 1.0), ({"a": 2.0}, 2.0), ({"b": 1.0, "c": 5.0}, 3.0), ({}, 2.0)]

    monkeypatch.setattr(river.datasets, "Phishing", Changing)
    learn("river:Phishing")
    out, err = capfd.readouterr()
    assert "4 samples, 4 scored" in out
    assert "line 3: column 'c' is not read, because the first line has none" in err

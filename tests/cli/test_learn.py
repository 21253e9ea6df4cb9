"""`scanl learn`: what it reads, refuses and writes, and that it goes on to the bit."""

import csv
import errno
import gc
import io
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from forked import begun

pytest.importorskip("river", reason="river is not installed: pip install 'scanl[online]'")

from scanl.cli import main
from scanl.cli.learn import parse
from scanl.errors import CheckpointError, DataError
from scanl.learning.online.folder import OnlineFolder, Rows
from scanl.learning.online.reading import Columns, rows
from scanl.learning.online.run import Run

COVERS = ["learning/online/config", "learning/online/folder", "learning/online/reading", "learning/online/run"]
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


def test_what_the_caller_has_frozen_stays_frozen(series):
    """Or every collection after it walks through the caller's objects, too."""
    gc.freeze()
    learn(series, "--samples", 3)
    assert gc.get_freeze_count() > 0


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
    run = Run(config, None, print)
    run.learn()
    assert run.columns.names == ["y", "a"]
    assert (run.loop.count, run.scored, len(run.ahead)) == (20, 17, 3)


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


def test_a_mark_of_the_byte_order_a_second_line_of_names_and_a_missing_number():
    first, second = rows([b"\xef\xbb\xbfa,y\n", b"1,2\n", b"a,y\n", b"NA,3\n"], 0)
    columns = Columns.of(first, "y", None, None, None, [])
    item = columns.item(second)
    assert (columns.names, item.number, item.truth) == (["a"], 4, 3.0)
    assert math.isnan(item.inputs[0])


def test_a_sample_beyond_those_that_may_wait_is_given_up(tmp_path):
    path = tmp_path / "objects.jsonl"
    path.write_text("".join(f'{{"id": {t}, "x": {t}, "y": null}}\n' for t in range(5)))
    config, _ = parse([str(path), "--target", "y", "--key", "id", "--question", "number", "--waiting", "2", *TINY])
    run = Run(config, None, print)
    run.learn()
    assert list(run.keys) == [3, 4]
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
    run = Run(config, None, print)
    run.learn()
    assert (run.scored, len(run.hidden)) == (54, 5)


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
    before = Rows(path, ["a"], None)
    before.append([1])
    size = before.settle()
    before.append([2])
    before.close()
    Rows(path, ["a"], size).close()
    assert path.read_text() == "a\n1\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
def test_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "full.csv").symlink_to("/dev/full")
    rows = Rows(tmp_path / "full.csv", ["a"], None)
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
    run, replace, opened = tmp_path / "run", os.replace, Rows.__init__
    writes = iter(range(30))

    def filling(rows, *arguments):
        opened(rows, *arguments)
        if rows.path.name == file:
            rows._file = Filling(rows._file)

    with monkeypatch.context() as full:
        full.setattr(Rows, "__init__", filling)
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
    take = Run._take

    def interrupted(self, item):
        take(self, item)
        if item.number == 10:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Run, "_take", interrupted)
    assert main(["learn", str(series), "--out", str(tmp_path / "run"), *TINY]) == 130
    assert "interrupted; saved" in capfd.readouterr().err
    assert OnlineFolder.open(tmp_path / "run").stored()["counts"][0] == 10


def test_drifts_are_kept_by_a_resumed_run(series, tmp_path):
    learn(series, "--out", tmp_path / "run", "--samples", 3)
    folder = OnlineFolder.open(tmp_path / "run")
    run = Run(folder.config(), folder, print)
    run.drifts.append(2)
    run._save()
    resumed = Run(folder.config(), folder, print)
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
        Run(config, None, print).learn()

"""Each script of examples/ runs, in small, as its docstring says."""

import io
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MONTHS = [f"{2000 + month // 12}-{month % 12 + 1:02}-01,{month % 12 + month / 50}" for month in range(96)]
SMALL = {  # the words after the script, the package that it needs beside scanl, and what it prints
    "classify_series": ("--count 100", "sklearn", "accuracy on 25 others"),
    "compare_recall": ("gru --dim 16 --length 16 --pairs 2 --steps 3", "torch", "floats of state"),
    "fast_pretrained": ("--text book.txt --length 32 --steps 1", "transformers", "MambaForCausalLM.from_pretrained"),
    "forecast_table": ("sales.csv --time month --target sales --horizon 3 --minutes 0.02", "pandas", "has 3 rows"),
    "irregular_times": ("--steps 2", "torch", "cfc, told nothing"),
    "learn_online": ("-", "river", "sample 500: MAE"),
    "offline_decisions": ("--episodes 4 --steps 2 --played 1", "gymnasium", "wanted 200, reached"),
    "own_cell": ("--steps 2", "torch", "by chance"),
    "ppo_memory": ("--steps 2048 --export agent.c", "gymnasium", "mean return"),
    "stream_text": ("book.txt --steps 3 --bytes 5", "torch", ""),
}


def test_every_script_is_run_and_short():
    scripts = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert scripts.keys() == SMALL.keys()
    long = {name: count for name, path in scripts.items() if (count := path.read_text("utf-8").count("\n")) >= 80}
    assert not long


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("registered")
def test_script_runs(name, tmp_path, monkeypatch, capfd):
    words, package, expected = SMALL[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Once upon a time there was a state. " * 100, encoding="utf-8")
    Path("sales.csv").write_text("\n".join(["month,sales", *MONTHS]), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{t % 7}\n" for t in range(502))))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split()])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert expected in capfd.readouterr().out

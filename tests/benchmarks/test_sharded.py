import csv
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from quality import sharded


@pytest.mark.long
def test_each_part_adds_its_rows(tmp_path, monkeypatch):
    """It starts forty processes. The benchmark itself asserts what it shows."""
    monkeypatch.setattr(sys, "argv", ["sharded", "--quick", "--results", str(tmp_path)])
    sharded.main()
    with (tmp_path / "quick" / "sharded.csv").open() as file:
        parts = [row["part"] for row in csv.DictReader(file)]
    assert parts == ["forms"] * 7 + ["launched"] * 2 + ["killed"] * 3 + ["lost"] * 3 + ["other"]

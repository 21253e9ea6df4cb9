import csv
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from speed import divided


@pytest.mark.long
def test_each_part_adds_its_rows(tmp_path, monkeypatch):
    """It starts ten processes."""
    monkeypatch.setattr(sys, "argv", ["divided", "--quick", "--results", str(tmp_path)])
    divided.main()
    with (tmp_path / "quick" / "divided.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["part"], row.get("ranks")) for row in rows] == [("memory", ""), ("exchange", "2"), ("exchange", "4")]

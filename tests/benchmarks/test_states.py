import csv
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from quality import states


@pytest.mark.long
def test_two_processes_share_a_folder(tmp_path, monkeypatch):
    """The benchmark itself asserts what it shows."""
    monkeypatch.setattr(sys, "argv", ["states", "--seconds", "5", "--kills", "0.5", "--results", str(tmp_path)])
    states.main()
    with (tmp_path / "states.csv").open() as file:
        assert [row["part"] for row in csv.DictReader(file) if int(row["texts"])] == ["roomy", "tight"]

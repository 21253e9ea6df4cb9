"""The picture and the file of inspections."""

import csv

import pytest
import torch

from scanl.errors import ConfigError
from scanl.inspect import gradient_norms, mixing_matrix, picture, save_columns, save_picture
from scanl.inspect.base import noise
from scanl.inspect.picture import MAX_PANELS
from scanl.layers import LRU


@pytest.fixture(scope="module")
def inspection():
    torch.manual_seed(0)
    return gradient_norms(LRU(4), noise(2, 20, 4))


def test_one_panel_for_each_layer(inspection):
    figure = picture({"0 lru": inspection, "1 lru": inspection}, "Gradients")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == ["0 lru", "1 lru"]
    assert shown[0].get_xlabel() == "distance, steps"
    assert shown[0].get_ylim() == shown[1].get_ylim()
    assert figure.get_suptitle() == "Gradients"
    (line,) = [line for line in shown[0].lines if line.get_linewidth() > 1]
    torch.testing.assert_close(torch.as_tensor(line.get_ydata()), inspection.norms.square().mean(0).sqrt())


def test_more_panels_than_a_picture_has(inspection):
    figure = picture({str(index): inspection for index in range(MAX_PANELS + 2)})
    assert sum(axes.get_visible() for axes in figure.axes) == MAX_PANELS
    assert figure.get_suptitle() == f"the first {MAX_PANELS} of {MAX_PANELS + 2} panels"
    with pytest.raises(ConfigError, match="picture: inspections is empty, expected at least one"):
        picture({})


def test_a_panel_for_each_head():
    figure = picture(mixing_matrix(LRU(4), noise(1, 6, 4)))
    assert [axes.get_title(loc="left") for axes in figure.axes][:3] == ["head 0", "head 1", "head 2"]


def test_files(inspection, tmp_path):
    assert save_picture(tmp_path / "a.png", inspection).read_bytes().startswith(b"\x89PNG")
    path = save_columns(tmp_path / "a.csv", {"0 lru": inspection, "1 lru": inspection})
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 2 * 2 * 20
    assert [float(row["norm"]) for row in rows[:20]] == inspection.norms[0].tolist()
    assert {row["layer"] for row in rows} == {"0 lru", "1 lru"}

"""`scanl export`: a run's model as a file."""

from scanl.cli import main
from scanl.learning import RunFolder
from scanl.learning.run.config import TrainConfig, seeded_model

COVERS = ["export/file"]


def test_a_run_becomes_a_file(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("Once upon a time. " * 40)
    options = {"layer": "mingru", "dim": 4, "depth": 1, "accelerator": "cpu", "data": [str(tmp_path / "book.txt")]}
    config = TrainConfig.of(**options, out=str(tmp_path / "run"))
    folder, model = RunFolder.fresh(config), seeded_model(config, config.open_source().question)
    folder.create(config)
    folder.save_model(model, "0")
    file = tmp_path / "cell.c"
    assert main(["export", str(tmp_path / "run"), str(file), "--name", "book", "--portable"]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert "void book_step(const int *x, struct book_state *s, float *y)" in file.read_text()
    assert "own_sigmoid32" in file.read_text()


def test_refusals(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("", encoding="utf-8")
    for argv, message in (
        (["model.tflite"], "path is model.tflite, expected a file of .onnx or .c or .pt2 or .html"),
        (["model.onnx", "--name", "cell"], "name is cell, but model.onnx is no file of .c; leave it out"),
        (["model.onnx", "--portable"], "portable is True, but model.onnx is no file of .c; leave it out"),
    ):
        assert main(["export", str(tmp_path), *argv]) == 2
        assert message in capsys.readouterr().err

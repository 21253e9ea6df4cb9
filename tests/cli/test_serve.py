"""`scanl serve` and `scanl bench-decode`: what they load, and one line for every mistake."""

import importlib.util

import pytest
import torch

from scanl.cli import main
from scanl.cli.serve import load
from scanl.errors import ConfigError
from scanl.models import LanguageModel, Stack
from scanl.serve.texts import ByteText, NumberText

COVERS = ["cli/bench_decode"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("serve")
    for size in (256, 7):
        LanguageModel(size, Stack(8, 1, "lru")).save(path / str(size))
    return path


def refused(capfd, *words):
    assert main([*map(str, words)]) == 2
    return capfd.readouterr().err


def test_a_model_is_loaded_with_its_texts(folder):
    model, texts = load(str(folder / "256"), "serve")
    assert isinstance(texts, ByteText)
    assert not model.training
    assert isinstance(load(str(folder / "7"), "serve")[1], NumberText)


def test_mistakes(folder, capfd):
    assert "nowhere is not a folder, expected a run" in refused(capfd, "bench-decode", "nowhere")
    assert "serve: streams is 0, expected above 0" in refused(capfd, "serve", folder / "256", "--streams", 0)
    assert "serve: port is 70000, expected 0 to 65535" in refused(capfd, "serve", folder / "256", "--port", 70000)
    assert "bench-decode: batches is [0], expected numbers of at least 1" in refused(
        capfd, "bench-decode", folder / "256", "--batches", "[0]"
    )


@pytest.mark.skipif(importlib.util.find_spec("fastapi") is not None, reason="fastapi is installed")
def test_without_fastapi_the_extra_is_named(folder, capfd):
    assert "pip install 'scanl[serve]'" in refused(capfd, "serve", folder / "256")


def test_a_port_that_is_taken_is_refused(folder, capfd):
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'scanl[serve]'")
    from scanl.cli.serve import listening

    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} cannot be listened to: .*; choose another --port"):
            listening("127.0.0.1", port)


def test_bench_decode_prints_a_row_for_each_batch(folder, capfd):
    words = ["--tokens", "2", "--prompt", "3", "--batches", "[1,3]"]
    assert main(["bench-decode", str(folder / "7"), *words]) == 0
    head, *rows = capfd.readouterr().out.splitlines()
    assert head.split() == ["batch", "ms", "a", "step", "tokens/s", "tokens/s", "a", "text"]
    assert [row.split()[0] for row in rows] == ["1", "3"]

"""`scanl accelerate`: its report, its table of speeds, and one line for every mistake."""

import sys

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'scanl[hub]'")

from hub_models import CASES, VOCAB
from scanl.cli import accelerate, main
from scanl.hub import forwards


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lfm2")
    CASES["lfm2"].build().save_pretrained(path)
    return path


def is_accelerated(model):
    return forwards.replaced(model.model.layers[0].conv)


def test_report(folder, capfd):
    assert main(["accelerate", str(folder)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["modules", "class", "before", "now", "note"]
    assert lines[1].startswith("model.layers.0.conv and 1 more  Lfm2ShortConv  ")
    assert len(lines) == 2


def test_bench(folder, capfd):
    assert main(["accelerate", str(folder), "--bench", "--length", "12", "--decode", "3"]) == 0
    _, table = capfd.readouterr().out.split("\n\n")
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["before", "after", "times", "faster"]
    assert [row[:-3] for row in rows[1:]] == [
        ["prefill", "of", "12,", "tokens/s"],
        ["decode", "of", "3,", "tokens/s"],
        ["forward", "and", "backward,", "s"],
    ]
    assert all(float(cell.replace(",", "")) > 0 for row in rows[1:] for cell in row[-3:])


def test_bench_takes_medians_of_turns(folder, monkeypatch, capfd):
    """The first turn of each side does not count, nor does one slow turn; the accelerated side is the second."""
    turns, prefill = [], iter([9.0, 9.0, 2.0, 0.5, 2.0, 0.5, 8.0, 8.0, 2.0, 0.5, 2.0, 0.5])

    def generate(model, ids, decode):
        assert ids.shape == (1, 100)
        assert ids.max() < VOCAB
        turns.append(is_accelerated(model))
        return next(prefill), 1.0 * decode

    monkeypatch.setattr(accelerate, "_generate", generate)
    monkeypatch.setattr(accelerate, "_train", lambda model, ids: 0.3 if is_accelerated(model) else 0.1)
    assert main(["accelerate", str(folder), "--bench", "--length", "100", "--decode", "4"]) == 0
    assert turns == [False, True] * 6
    assert capfd.readouterr().out.splitlines()[3:] == [
        "                          before  after  times faster",
        "prefill of 100, tokens/s      50    200          4.00",
        "decode of 4, tokens/s          1      1          1.00",
        "forward and backward, s    0.100  0.300          0.33",
    ]


def test_decode_is_timed_token_by_token(folder):
    """The prompt's part ends with the first token, and every token after it is generated, whatever ends a text."""
    clock = accelerate._Clock()
    model = accelerate._load(str(folder))
    ids = model.dummy_inputs["input_ids"][:1] % VOCAB
    model.generate(ids, streamer=clock, do_sample=False, pad_token_id=0, min_new_tokens=6, max_new_tokens=6)
    assert len(clock.times) == 1 + 6
    assert all(seconds > 0 for seconds in accelerate._generate(model, ids, 5))


def test_a_model_without_recurrent_modules(tmp_path, capfd):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).save_pretrained(tmp_path)
    assert main(["accelerate", str(tmp_path), "--bench"]) == 0
    assert (
        capfd.readouterr().out == "this model has no recurrent module of transformers or torch: nothing was changed\n"
    )


def refused(capfd, *argv):
    assert main(["accelerate", *argv]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    return err.splitlines()[-1]


def test_mistakes(folder, tmp_path, monkeypatch, capfd):
    assert "--bensh" in refused(capfd, str(folder), "--bensh")
    assert refused(capfd, str(folder), "--length", "0") == "scanl: accelerate: length is 0, expected at least 1"
    assert refused(capfd, str(folder), "--decode", "0") == "scanl: accelerate: decode is 0, expected at least 1"
    nothing = tmp_path / "nothing" / "there"
    assert refused(capfd, str(nothing)).startswith(f"scanl: accelerate: cannot load {nothing}: ")
    assert refused(capfd, str(tmp_path)).startswith(f"scanl: accelerate: cannot load {tmp_path}: ")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert refused(capfd, str(damaged)).startswith(f"scanl: accelerate: cannot load {damaged}: ")
    (damaged / "model.safetensors").write_bytes(b"no weights")
    assert refused(capfd, str(damaged)).startswith(f"scanl: accelerate: cannot load {damaged}: ")
    monkeypatch.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)
    line = "scanl: accelerate: transformers is not installed; pip install 'scanl[hub]'"
    assert refused(capfd, str(folder)) == line

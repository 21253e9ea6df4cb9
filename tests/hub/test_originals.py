"""Checkpoints of the authors' programs: the logits that their programs gave, and an error for everything else.

tests/hub/make_originals.py makes the checkpoints in `originals` anew, and says which programs wrote them.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import laws
from scanl import hub
from scanl.cli import main
from scanl.errors import CheckpointError
from scanl.hub import originals

COVERS = ["hub/originals/*"]

FOLDER = Path(__file__).with_name("originals")
GIVEN = json.loads((FOLDER / "logits.json").read_text())
TOKENS = torch.tensor([GIVEN["tokens"]])
each = pytest.mark.parametrize("name", sorted(GIVEN["logits"]))
ERROR = 1e-5


def source(name, folder=FOLDER):
    """What `hub.load` gets: the file of RWKV-LM, or the folder."""
    file = folder / name / "rwkv.pth"
    return file if file.exists() else folder / name


def copied(name, tmp_path):
    shutil.copytree(FOLDER / name, tmp_path / name)
    return source(name, tmp_path)


@each
@torch.no_grad()
def test_logits_are_those_of_the_authors(name):
    model, wanted = hub.load(source(name), dtype=torch.float32), torch.tensor([GIVEN["logits"][name]])
    whole, _ = model(TOKENS)
    assert whole.shape == wanted.shape
    assert (whole - wanted).abs().max() <= ERROR * wanted.abs().max()
    state, steps = None, []
    for t in range(TOKENS.shape[1]):
        y, state = model(TOKENS[:, t : t + 1], state)
        steps.append(y)
    assert (torch.cat(steps, 1) - wanted).abs().max() <= ERROR * wanted.abs().max()


def test_every_layout_has_a_checkpoint():
    def layout(name):
        path = source(name)
        if path.is_file():
            return hub.checkpoints._layout_of_file(hub.weights.Weights(path))
        return hub.checkpoints._layout_of(*hub.folders.read_config(path))

    assert {layout(name).name for name in GIVEN["logits"]} == set(originals.names())


@each
def test_parameters_keep_their_dtype(name):
    assert {parameter.dtype for parameter in hub.load(source(name)).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["mamba", "mamba2", "fla_mamba", "rwkv4", "xlstm"])
@torch.no_grad()
def test_what_transformers_has_is_saved_for_it(name, tmp_path):
    model = hub.load(source(name), dtype=torch.float32)
    hub.save(model, tmp_path / "out")
    assert torch.equal(hub.load(tmp_path / "out")(TOKENS)[0], model(TOKENS)[0])


def refused(message, path):
    with pytest.raises(CheckpointError) as caught:
        hub.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("mamba", {"attn_layer_idx": [1]}, "attn_layer_idx is (1,), expected (): scanl has no other option"),
        (
            "mamba",
            {"ssm_cfg": {"layer": "Mamba3"}},
            "layer is 'Mamba3', expected 'Mamba1' or 'Mamba2': scanl has no other",
        ),
        ("mamba", {"ssm_cfg": [1]}, "ssm_cfg is [1], expected an object of options"),
        (
            "mamba",
            {"ssm_cfg": {"d_state": 5}},
            "mixer.A_log has shape (16, 4), expected (16, 5) because of config.json",
        ),
        ("mamba", {"n_layer": 3}, "has 2 blocks named backbone.layers.*, expected 3 because of n_layer in config.json"),
        ("mamba", {"pad_vocab_size_multiple": 7}, "embedding.weight has shape (16, 8), expected (14, 8)"),
        ("mamba", {"tie_embeddings": False, "rms_norm": 1}, "rms_norm is 1, expected true or false"),
        ("mamba2", {"ssm_cfg": {"layer": "Mamba2", "headdim": 5}}, "num_heads * head_dim is 15, expected 16"),
        ("xlstm", {"weight_mode": "fused"}, "weight_mode is 'fused', expected 'single'"),
        ("gla", {"feature_map": "relu"}, "feature_map is 'relu', expected None"),
        ("gla", {"num_heads": 0}, "num_heads is 0, expected an integer of at least 1"),
        ("delta_net", {"use_short_conv": False}, "has the extra weights model.layers.0.attn.k_conv1d.weight"),
        ("fla_mamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu' or 'swish'"),
        ("fla_mamba", {"dt_rank": 4}, "mixer.dt_proj.weight has shape (16, 3), expected (16, 4)"),
        ("rwkv6_folder", {"expand_k": 0.5}, "expand_k is 0.5, expected 1.0: scanl has no other option"),
        ("rwkv6_folder", {"norm_eps": 1e-6}, "norm_eps is 1e-06, expected 1e-05"),
        ("rwkv6_folder", {"num_heads": 3}, "attn.bonus has shape (2, 4), expected (3, 2)"),
        ("rwkv7_folder", {"norm_eps": 1e-5}, "norm_eps is 1e-05, expected 0.00016 because of head_dim"),
    ],
)
def test_options_that_scanl_does_not_have(name, entries, message, tmp_path):
    folder = copied(name, tmp_path)
    edit(folder, **entries)
    refused(message, folder)


def edit(folder, **entries):
    """Change options; those of mamba-ssm's layers are in ssm_cfg."""
    path, read, write = folder / "config.json", json.loads, json.dumps
    if not path.exists():
        path, read, write = folder / "config.yaml", yaml.safe_load, yaml.safe_dump
    path.write_text(write(read(path.read_text()) | entries))


def loaded(path):
    """The model, or why there is none."""
    try:
        return hub.load(path)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize(
    "name",
    [
        "mamba", "mamba2", "xlstm", "gla", "delta_net", "gated_deltanet", "hgrn2", "fla_mamba", "rwkv6_folder",
        "rwkv7_folder",
    ],
)  # fmt: skip
def test_odd_entries_are_refused_or_fit(name, tmp_path):
    """One line for each, never a traceback, and no memory for a size that no weight has."""
    folder = copied(name, tmp_path)
    config, path = hub.folders.read_config(folder)
    layout, text = hub.checkpoints._layout_of(config, path), path.read_text()
    refusals, odds = 0, (None, [1], {}, -1, 1e30, math.nan, 10**6, 2**63 - 1, 10**25)
    for number, key in enumerate([*layout.defaults, *layout.only]):
        for odd in odds if laws.ALL else odds[number % 3 :: 3]:
            path.write_text(text)
            options = config.get("ssm_cfg", {})
            inner = key in options or (name.startswith("mamba") and key not in config)
            edit(folder, **({"ssm_cfg": options | {key: odd}} if inner else {key: odd}))
            if isinstance(message := loaded(folder), str):
                assert "\n" not in message
                refusals += 1
    assert refusals > (6 if laws.ALL else 2) * len(layout.defaults)


def test_entries_of_mamba_ssm_in_a_config_of_transformers():
    """transformers keeps them beside its own where it has converted a checkpoint."""
    config = {"model_type": "mamba", "d_model": 768, "n_layer": 24}
    assert not any(originals.get(name).recognizes(config) for name in originals.names())


@pytest.mark.parametrize("version", [4, 5, 6, 7])
def test_weights_of_rwkv_that_are_missing_left_over_or_misshapen(version, tmp_path):
    path = copied(f"rwkv{version}", tmp_path)
    weights = torch.load(path, weights_only=True)

    def stored(changed):
        torch.save({name: weight for name, weight in changed.items() if weight is not None}, path)

    for name in ("blocks.1.att.output.weight", "blocks.0.ffn.key.weight", "emb.weight", "blocks.0.ln0.bias"):
        stored(weights | {name: None})
        refused(f"lacks {name}", path)
    stored(weights | {"more": torch.ones(1)})
    refused("has the extra weights more; expected the weights that the shape of the others describes", path)
    stored(weights | {"emb.weight": torch.ones(11)})
    refused("emb.weight has shape (11,), expected 2 axes", path)
    stored(weights | {"blocks.1.att.key.weight": torch.ones(8, 7)})
    refused("blocks.1.att.key.weight has shape (8, 7), expected (8, 8)", path)
    stored(weights | {"head.weight": torch.ones(11, 8, dtype=torch.int8)})
    refused("head.weight is torch.int8, expected one of F64, F32, BF16, F16", path)
    stored({name: weight for name, weight in weights.items() if ".att." not in name})
    refused("is not of RWKV, expected one of the weights", path)


def test_unused_weights_of_the_lowest_layer_of_rwkv7(tmp_path):
    path = copied("rwkv7", tmp_path)
    weights = torch.load(path, weights_only=True)
    extra = {name: torch.ones(1) for name in originals.get("rwkv_lm_7").ignored}
    torch.save({**extra, **weights}, path)
    assert torch.equal(hub.load(path)(TOKENS)[0], hub.load(FOLDER / "rwkv7" / "rwkv.pth")(TOKENS)[0])


@pytest.mark.parametrize("axes", [(), (1, 1)])
def test_rwkv7_as_published_has_one_tensor_of_token_shifts(axes, tmp_path):
    """The order is that of the program which converts them: r, w, k, v, a, g."""
    path = copied("rwkv7_folder", tmp_path) / "model.safetensors"
    weights = load_file(path)
    for block in {name.partition(".attn.")[0] for name in weights if ".attn.x_" in name}:
        rows = [weights.pop(f"{block}.attn.x_{letter}").flatten() for letter in "rwkvag"]
        weights[f"{block}.attn.x_x"] = torch.stack(rows).unflatten(1, (*axes, -1))
    save_file(weights, path)
    assert torch.equal(hub.load(path.parent)(TOKENS)[0], hub.load(FOLDER / "rwkv7_folder")(TOKENS)[0])
    weights["model.layers.0.attn.x_x"] = weights["model.layers.0.attn.x_x"][:5].clone()
    save_file(weights, path)
    refused("has the extra weights model.layers.0.attn.x_x", path.parent)


def test_rwkv_as_safetensors(tmp_path):
    weights = torch.load(FOLDER / "rwkv6" / "rwkv.pth", weights_only=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, tmp_path / "rwkv.safetensors")
    found = hub.load(tmp_path / "rwkv.safetensors")(TOKENS)[0]
    assert torch.equal(found, hub.load(FOLDER / "rwkv6" / "rwkv.pth")(TOKENS)[0])


def test_the_numbered_files_of_xlstm(tmp_path):
    folder = copied("xlstm", tmp_path)
    weights = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    for number in range(3):
        save_file(dict(weights[number::3]), folder / f"model_{number}.safetensors")
    assert torch.equal(hub.load(folder)(TOKENS)[0], hub.load(FOLDER / "xlstm")(TOKENS)[0])
    save_file(dict(weights[1:3]), folder / "model_2.safetensors")
    refused(f"model_2.safetensors holds {weights[1][0]!r}, expected it in model_1.safetensors alone", folder)
    (folder / "model_2.safetensors").unlink()
    refused(f"checkpoint: {folder} lacks backbone.blocks.0.", folder)


def test_the_first_decays_of_rwkv5(tmp_path):
    """RWKV-5.0 and 5.1 have one decay for each head."""
    path = copied("rwkv5", tmp_path)
    weights = torch.load(path, weights_only=True)
    torch.save(weights | {"blocks.0.att.time_decay": torch.ones(2)}, path)
    refused("blocks.0.att.time_decay has shape (2,), expected 2 axes", path)


@pytest.mark.parametrize("name", ["mamba", "rwkv6"])
def test_no_program_in_a_file_is_run(name, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    path = copied(name, tmp_path)
    file = path if path.is_file() else path / "pytorch_model.bin"
    whole = file.read_bytes()
    for content in ({"emb.weight": Bomb()}, Bomb(), [torch.ones(1)], {"emb.weight": 1}, {1: torch.ones(1)}):
        torch.save(content, file)
        refused(f"checkpoint: {file}", path)
    torch.save({"emb.weight": torch.ones(1).expand(10**9)}, file)
    refused("repeats its numbers", path)
    for end in (0, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        refused(f"checkpoint: {file} cannot be read without running what it contains", path)
    assert not (tmp_path / "ran").exists()


def test_no_weights(tmp_path):
    for name, message in (
        ("mamba", "has no weights, expected model.safetensors, model.safetensors.index.json or pytorch_model.bin"),
        ("gla", "has no weights, expected model.safetensors or model.safetensors.index.json"),
    ):
        folder = copied(name, tmp_path)
        for path in [*folder.glob("*.bin"), *folder.glob("*.safetensors")]:
            path.unlink()
        refused(message, folder)
    (tmp_path / "gla" / "config.json").unlink()
    refused("name a folder that transformers has saved, or a checkpoint of the authors' program", tmp_path / "gla")
    (tmp_path / "gla" / "config.yaml").write_text("a: [")
    refused("config.yaml is damaged", tmp_path / "gla")
    (tmp_path / "gla" / "config.yaml").write_text("model_type: gla2")
    refused("model_type is 'gla2', expected one of falcon_mamba, llama", tmp_path / "gla")
    refused("xlstm, or options of flash-linear-attention, mamba-ssm, RWKV-LM, xlstm", tmp_path / "gla")


def test_missing_weights_of_a_folder(tmp_path):
    folder = copied("delta_net", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.attn.b_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    refused("lacks model.layers.1.attn.b_proj.weight", folder)


def test_generation_needs_a_tokenizer(capfd):
    assert main(["generate", "--hub", str(FOLDER / "rwkv4" / "rwkv.pth"), "--prompt", "x"]) == 2
    assert "rwkv.pth has no tokenizer, expected tokenizer.json" in capfd.readouterr().err


def test_pickled_weights_of_the_hub(monkeypatch, tmp_path):
    """The file of torch.save is downloaded only where the authors' program writes it."""
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    asked = []

    def download(name, revision, allow_patterns):
        asked.append(allow_patterns)
        return str(FOLDER / name.partition("/")[2])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.load("owner/mamba")
    assert [patterns[-1] for patterns in asked] == ["*.safetensors", "pytorch_model.bin"]
    asked.clear()
    hub.load("owner/gla")
    assert [patterns[-1] for patterns in asked] == ["*.safetensors"]

"""Checkpoints of transformers in and out: the same logits, the same bits, and an error for everything else."""

import json
import math
import re
import shutil
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

import transformers
from safetensors.torch import load_file, save_file

import laws
from scanl import hub
from scanl.cli import main
from scanl.cli.generate import whole_characters
from scanl.errors import CheckpointError, ConfigError
from scanl.hub import checkpoints, formats
from scanl.layers import param_groups
from scanl.learning import t2r
from scanl.models import LanguageModel, Stack

COVERS = ["hub/folders", "hub/formats/*", "hub/weights"]

VOCAB = 50
SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "vocab_size": VOCAB}
TURNED = {"use_bias": True, "use_conv_bias": False, "residual_in_fp32": False, "layer_norm_epsilon": 0.01}
SPLIT = {"num_heads": 4, "head_dim": 8, "state_size": 4}
GRIFFIN = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48, "attention_window_size": 4}
GRIFFIN_TURNED = {
    "hidden_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "head_dim": 8,
    "lru_width": 32,
    "conv1d_width": 3,
    "attention_bias": True,
    "block_types": ["attention", "recurrent"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    "rms_norm_eps": 0.01,
    "logits_soft_cap": 2.0,
    "tie_word_embeddings": False,
}
LARGE = {"hidden_size": 128, "num_heads": 2, "chunk_size": 4}  # its cache takes multiples of 64 channels alone
LARGE_TURNED = {
    "num_heads": 4,
    "qk_dim_factor": 1.0,
    "v_dim_factor": 0.5,
    "gate_soft_cap": 2.0,
    "norm_eps": 0.01,
    "eps": 0.1,
    "ffn_proj_factor": 1.1,
    "ffn_round_up_to_multiple_of": 32,
    "output_logit_soft_cap": 2.0,
}
LLAMA_TURNED = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "rms_norm_eps": 0.01,
    "tie_word_embeddings": True,
}
MODELS = {
    "mamba": ("Mamba", {"state_size": 4}),
    "mamba_turned": ("Mamba", {**TURNED, "conv_kernel": 3, "expand": 3, "time_step_rank": 5}),
    "mamba_untied": ("Mamba", {"tie_word_embeddings": False, "hidden_act": "swish"}),
    "mamba2": ("Mamba2", {**SPLIT, "n_groups": 2}),
    "mamba2_turned": ("Mamba2", {**SPLIT, **TURNED, "n_groups": 1, "tie_word_embeddings": True, "conv_kernel": 2}),
    "rwkv": ("Rwkv", {}),
    "rwkv_turned": ("Rwkv", {"intermediate_size": 24, "tie_word_embeddings": True, "rescale_every": 0}),
    "falcon_mamba": ("FalconMamba", {"state_size": 4, "tie_word_embeddings": False}),
    "falcon_mamba_turned": ("FalconMamba", {**TURNED, "mixer_rms_eps": 0.1}),
    "recurrent_gemma": ("RecurrentGemma", GRIFFIN),
    "recurrent_gemma_turned": ("RecurrentGemma", {**GRIFFIN, **GRIFFIN_TURNED}),
    "llama": ("Llama", {"num_attention_heads": 2, "intermediate_size": 24}),
    "llama_turned": ("Llama", LLAMA_TURNED),
    "xlstm": ("xLSTM", LARGE),
    "xlstm_turned": ("xLSTM", {**LARGE, **LARGE_TURNED}),
}
each = pytest.mark.parametrize("name", MODELS)


def made(name, **more):
    """Every number random, so that none can be left where it was."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options, **more})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("igate_preact.bias"):
                parameter.zero_()  # xLSTM's starts so low that nothing enters its memory
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Checkpoints that transformers wrote, each once."""
    folder, models = tmp_path_factory.mktemp("hub"), {}

    def get(name):
        if name not in models:
            models[name] = made(name)
            models[name].save_pretrained(folder / name)
        return models[name], folder / name

    return get


@pytest.fixture
def folder(stored, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(stored("mamba")[1], tmp_path / "spoilt")


def model_of(arguments):
    return LanguageModel(**{**arguments, "stack": Stack(**arguments["stack"])})


def tokens(batch=2, steps=11):
    return torch.randint(1, VOCAB, (batch, steps), generator=torch.Generator().manual_seed(1))


def close(found, wanted, error=1e-5, exact=None):
    """exact: `wanted` as float64 has it, by which `wanted` is wrong itself."""
    assert found.shape == wanted.shape
    assert wanted.isfinite().all()
    own = 0 if exact is None else 2 * (wanted - exact).abs().max()
    assert (found - wanted).abs().max() <= error * wanted.abs().max() + own


def edit(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@each
@torch.no_grad()
def test_logits_are_those_of_transformers(name, stored):
    theirs, path = stored(name)
    model, x = hub.load(path), tokens()
    assert not model.training
    wanted, exact = theirs(x).logits, made(name).double()(x).logits
    close(model(x)[0], wanted, exact=exact)
    state, steps = None, []
    for t in range(x.shape[1]):
        y, state = model(x[:, t : t + 1], state)
        steps.append(y)
    close(torch.cat(steps, 1), wanted, exact=exact)


@each
def test_gradients_are_those_of_transformers(name, stored):
    theirs, path = stored(name)
    model, x = hub.load(path), tokens()
    fmt = formats.get(theirs.config.model_type)

    def gradients(of):
        found = torch.autograd.grad(of(x, use_cache=False).logits.square().sum(), list(of.parameters()))
        return dict(zip([name for name, _ in of.named_parameters()], found, strict=True))

    wanted, exact = gradients(theirs), gradients(made(name).double())
    model(x)[0].square().sum().backward()
    for name, parameter in model.named_parameters():
        theirs_name = fmt.their_name(name)
        close(parameter.grad, wanted[theirs_name], 1e-4, exact[theirs_name])


@each
@torch.no_grad()
def test_round_trip_is_bit_identical(name, stored, tmp_path):
    theirs, path = stored(name)
    hub.save(hub.load(path), tmp_path / "out", like=path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    again = type(theirs).from_pretrained(tmp_path / "out").eval()
    wanted = type(theirs).from_pretrained(path).eval()  # before the first forward: RWKV's rescales the weights
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), wanted.parameters(), strict=True))
    assert torch.equal(again(tokens()).logits, wanted(tokens()).logits)
    ours, source = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "out", path))
    assert {key: ours.get(key) for key in source if key != "transformers_version"} == {
        key: value for key, value in source.items() if key != "transformers_version"
    }


@each
def test_entries_and_arguments_are_inverse(name, stored):
    theirs, path = stored(name)
    fmt = formats.get(theirs.config.model_type)
    entries = fmt.entries(hub.load(path))
    assert entries.keys() == fmt.defaults.keys()
    assert entries == {key: getattr(theirs.config, key) for key in entries}


@pytest.mark.parametrize("name", formats.names())
def test_defaults_are_those_of_transformers(name):
    found = formats.get(name)
    config = getattr(transformers, found.architecture.replace("ForCausalLM", "Config"))
    fields = {key: getattr(config, key, None) for key in [*found.defaults, *found.only]}
    assert all(hasattr(config(), key) for key in fields)  # some have only what has been built
    assert fields == found.defaults | {key: allowed[0] for key, allowed in found.only.items()}


@pytest.mark.parametrize("name", formats.names())
@torch.no_grad()
def test_a_model_of_scanl_is_written_for_transformers(name, stored, tmp_path):
    fmt = formats.get(name)
    config = fmt.defaults | json.loads((stored(name)[1] / "config.json").read_text())
    model = model_of(fmt.arguments(config)).eval()
    hub.save(model, tmp_path / "out")
    theirs = getattr(transformers, fmt.architecture).from_pretrained(tmp_path / "out").eval()
    close(model(tokens())[0], theirs(tokens()).logits)
    found = theirs.generate(tokens(1), max_new_tokens=5, do_sample=False)
    wanted = list(model.generate(tokens(1), max_new_tokens=5, temperature=0))
    assert found[0, -5:].tolist() == torch.cat(wanted).tolist()


@pytest.mark.parametrize("name", formats.names())
@torch.no_grad()
def test_bfloat16(name, stored, tmp_path):
    """In its dtype, nearer to the float32 model than twice transformers' own error."""
    whole = made(name)
    half = made(name).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    model = hub.load(tmp_path / "half")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    wide = hub.load(tmp_path / "half", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    exact = type(whole)(whole.config).eval()
    exact.load_state_dict(half.float().state_dict())
    wanted = exact(tokens()).logits
    close(wide(tokens())[0], wanted)
    theirs = type(half).from_pretrained(tmp_path / "half", dtype=torch.bfloat16).eval()(tokens()).logits.float()
    ours = model(tokens())[0].float()
    assert (ours - wanted).norm() <= 2 * (theirs - wanted).norm()
    hub.save(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    files = [load_file(tmp_path / place / "model.safetensors") for place in ("half", "again")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


@torch.no_grad()
def test_decays_in_float32_beside_half_precision(tmp_path):
    """As transformers stores RWKV in float16."""
    whole = made("rwkv")
    whole.save_pretrained(tmp_path / "whole")
    half = type(whole).from_pretrained(tmp_path / "whole", dtype=torch.float16)
    half.save_pretrained(tmp_path / "half")
    model = hub.load(tmp_path / "half")
    assert model.stack.blocks[0].mixer.time_decay.dtype == torch.float32
    assert model.embedding.weight.dtype == torch.float16
    logits, state = model(tokens())
    assert logits.dtype == torch.float16
    close(logits.float(), hub.load(tmp_path / "whole")(tokens())[0], 0.01)
    model(tokens(), state)
    hub.save(model, tmp_path / "again")
    files = [load_file(tmp_path / place / "model.safetensors") for place in ("half", "again")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


@torch.no_grad()
def test_shards(stored, tmp_path):
    theirs, path = stored("mamba")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    whole = hub.load(path).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in hub.load(tmp_path / "shards").state_dict().items())


def test_a_loaded_transformer_is_converted_to_t2r(stored):
    model = hub.load(stored("llama_turned")[1])
    converted = t2r.convert(model, 8)
    (loss,) = t2r.learn_feature_maps(converted, model, [tokens()])
    assert math.isfinite(loss)
    mine, theirs = converted.state_dict(), model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert converted(tokens())[0].isfinite().all()


def test_loaded_models_train_as_built_ones(stored):
    """Weight decay as the layers want it, gradients on, and tensors of their own."""
    model = hub.load(stored("mamba")[1])
    fmt = formats.get("mamba")
    twin = model_of(fmt.arguments({**fmt.defaults, **SMALL, "state_size": 4}))

    def undecayed(model):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [[names[id(p)] for p in group["params"]] for group in param_groups(model) if "weight_decay" in group]

    assert undecayed(model) == undecayed(twin)
    assert "stack.blocks.0.mixer.A_log" in undecayed(model)[0]
    assert all(p.requires_grad and p.is_contiguous() and p.data_ptr() % 16 == 0 for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "llama_turned", "recurrent_gemma", "recurrent_gemma_turned"])
@pytest.mark.parametrize("pad", [None, 0, 7])
def test_padding_gets_the_gradient_that_transformers_gives_it(name, pad, tmp_path):
    theirs = made(name, pad_token_id=pad)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hub.load(tmp_path / "theirs")
    tokens = torch.tensor([[7, 3, 0, 9, 7, 1]])
    ours(tokens)[0].square().sum().backward()
    theirs(tokens).logits.square().sum().backward()
    found, wanted = ours.embedding.weight.grad, theirs.get_input_embeddings().weight.grad
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    hub.save(ours, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["pad_token_id"] == pad
    ours.save(tmp_path / "own")
    assert LanguageModel.load(tmp_path / "own").embedding.padding_idx == pad


def test_a_padding_token_outside_the_vocabulary():
    with pytest.raises(ConfigError, match="padding_idx is 11, expected -11 to 10 because of vocab_size"):
        LanguageModel(11, Stack(8, 1), padding_idx=11)
    assert (LanguageModel(11, Stack(8, 1), padding_idx=3).embedding.weight[3] == 0).all()


@torch.no_grad()
def test_rescaled_rwkv(tmp_path):
    """transformers halves the stream at inference, so that its norms' epsilon weighs more; we do as its training."""
    config = transformers.RwkvConfig(**SMALL, rescale_every=1)
    torch.manual_seed(0)
    theirs = transformers.RwkvForCausalLM(config)
    theirs.save_pretrained(tmp_path / "rwkv")
    close(hub.load(tmp_path / "rwkv")(tokens())[0], theirs.train()(tokens()).logits)


@torch.no_grad()
def test_rotary_entries_of_older_checkpoints(stored, tmp_path):
    """Before transformers 5 they stood among the others; what rope_parameters has is worth more."""
    folder = shutil.copytree(stored("recurrent_gemma")[1], tmp_path / "older")
    old = {"rope_theta": 7.0, "partial_rotary_factor": 1.0}
    for new in (None, {"rope_theta": 9.0}):
        edit(folder, rope_parameters=new, **old)
        model = hub.load(folder)
        close(model(tokens())[0], transformers.RecurrentGemmaForCausalLM.from_pretrained(folder)(tokens()).logits)
        assert model.stack.blocks[2].mixer.rope_base == (9 if new else 7)
        assert model.stack.blocks[2].mixer.rotated == 8


def test_tied_weights_stored_twice(folder):
    """Accepted when they are the same."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["backbone.embeddings.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    assert hub.load(folder).head is None
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors")
    refused("lm_head.weight differs from backbone.embeddings.weight", folder)


def refused(message, folder, **options):
    with pytest.raises(CheckpointError) as caught:
        hub.load(folder, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "mambo"}, "model_type is 'mambo', expected one of falcon_mamba, llama, mamba, mamba2, rec"),
        ({"model_type": ["mamba"]}, "model_type is ['mamba'], expected one of"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu' or 'swish'"),
        ({"state_size": "4"}, "state_size is '4', expected an integer of at least 1 and below 2^63"),
        ({"vocab_size": -1}, "vocab_size is -1, expected an integer of at least 1 and below 2^63"),
        (
            {"time_step_rank": True},
            "time_step_rank is True, expected an integer of at least 1 and below 2^63 or 'auto'",
        ),
        ({"use_bias": 1}, "use_bias is 1, expected true or false"),
        ({"layer_norm_epsilon": None}, "layer_norm_epsilon is None, expected a number"),
        ({"layer_norm_epsilon": 1e300}, "is 1e+300, expected a number of at least 0 that float32 holds"),
        ({"hidden_size": 10**25}, "expected an integer of at least 1 and below 2^63"),
        ({"num_hidden_layers": 4}, "has 3 blocks named backbone.layers.*, expected 4 because of num_hidden_layers"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantized"),
        ({"state_size": 5}, "backbone.layers.0.mixer.A_log has shape (32, 4), expected (32, 5) because of config.json"),
    ],
)
def test_options_that_do_not_fit(folder, entries, message):
    edit(folder, **entries)
    refused(message, folder)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is (0.0, 0.1), expected (0.0, inf)"),
        ("mamba2", {"num_heads": 3}, "num_heads * head_dim is 24, expected 32 because of expand * hidden_size"),
        ("mamba2", {"n_groups": 8, "state_size": 1}, "num_groups is 8, expected a divisor"),
        ("rwkv", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06, expected 1e-05"),
        ("recurrent_gemma", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', expected 'gelu_pytorch_tanh'"),
        (
            "recurrent_gemma",
            {"block_types": [[]]},
            "block_types is [[]], expected a list of 'recurrent' and 'attention'",
        ),
        ("recurrent_gemma", {"rope_parameters": 3}, "rope_parameters is 3, expected an object"),
        ("recurrent_gemma", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn', expected 'default'"),
        ("recurrent_gemma", {"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0, expected a number above 0"),
        ("recurrent_gemma", {"num_key_value_heads": 3}, "k_proj.weight has shape (8, 16), expected (24, 16)"),
        ("xlstm", {"weight_mode": "fused"}, "weight_mode is 'fused', expected 'single'"),
        ("xlstm", {"num_blocks": 4}, "num_blocks is 4, expected 3 because of num_hidden_layers"),
        ("xlstm", {"gate_soft_cap": 0}, "gate_soft_cap is 0, expected more than 0"),
        ("xlstm", {"output_logit_soft_cap": 0}, "logit_cap is 0, expected more than 0"),
    ],
)
def test_options_of_other_formats(stored, tmp_path, name, entries, message):
    folder = shutil.copytree(stored(name)[1], tmp_path / "spoilt")
    edit(folder, **entries)
    refused(message, folder)
    refused("config.json", folder)


@pytest.mark.parametrize("name", formats.names())
def test_sizes_are_compared_before_anything_is_built(name, stored, tmp_path, monkeypatch):
    """Whatever a size in config.json says, a weight that contradicts it is named, and no memory is asked for."""
    folder = shutil.copytree(stored(name)[1], tmp_path / "spoilt")
    text, fmt = (folder / "config.json").read_text(), formats.get(name)
    found = dict(fmt.defaults) | json.loads(text)

    def built(**_):
        raise AssertionError("built")

    monkeypatch.setattr(formats.base, "Stack", built)
    # What no weight tells: how far attention looks back, and numbers that are no sizes.
    others = {"attention_window_size", "max_position_embeddings", "block_types", "rope_parameters", "pad_token_id"}
    others |= {key for key in found if key.endswith(("eps", "epsilon", "soft_cap"))}
    sizes = [key for key in fmt.defaults if key not in others and not isinstance(found[key], bool)]
    assert len(sizes) >= 5
    for key in sizes:
        for size in (10**6, 2**63 - 1):
            (folder / "config.json").write_text(text)
            edit(folder, **{key: size})
            with pytest.raises(CheckpointError) as caught:
                hub.load(folder)
            message = str(caught.value)
            assert "\n" not in message
            shapes = r": [\w.]+ has shape \(.*\), expected \(.*\) because of config.json"
            depth = rf"has 3 blocks named .*, expected {size} because of num_hidden_layers"
            product = r"num_heads \* head_dim is \d+, expected \d+ because of expand"
            same = r"\w+ is \d+, expected \d+ because of (hidden_size|num_hidden_layers)"  # two entries for one size
            assert re.search(f"{shapes}|{depth}|{product}|{same}", message), message
    if name == "mamba":
        (folder / "config.json").write_text(text)
        edit(folder, hidden_size=10**6)
        refused("backbone.embeddings.weight has shape (50, 16), expected (50, 1000000) because of config.json", folder)


def loaded(folder):
    """The model, or why there is none."""
    try:
        return hub.load(folder)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("name", formats.names())
def test_odd_entries_are_refused_or_fit(name, stored, tmp_path):
    """One line for each, never a traceback."""
    folder = shutil.copytree(stored(name)[1], tmp_path / "spoilt")
    text, fmt = (folder / "config.json").read_text(), formats.get(name)
    refusals, odds = 0, (None, [1], {}, -1, 1e300, math.nan, 10**25)
    for number, key in enumerate([*fmt.defaults, *fmt.only]):
        for odd in odds if laws.ALL else odds[number % 2 :: 2]:
            (folder / "config.json").write_text(text)
            edit(folder, **{key: odd})
            if isinstance(message := loaded(folder), str):
                assert "\n" not in message
                refusals += 1
    assert refusals > (5 if laws.ALL else 2) * len(fmt.defaults)


@pytest.mark.parametrize("part", ["header", "config.json", "model.safetensors.index.json"])
def test_flipped_bits(part, stored, tmp_path):
    """Where the format can tell, one line says so; what loads all the same has the weights that it had."""
    folder = tmp_path / "flipped"
    stored("mamba")[0].save_pretrained(folder, max_shard_size="20KB" if "index" in part else "1GB")
    path = folder / ("model.safetensors" if part == "header" else part)
    wanted, whole = hub.load(folder).state_dict(), path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little") if part == "header" else len(whole)
    generator = torch.Generator().manual_seed(0)
    refusals = 0
    for bit in [*range(0, 64, 7), *torch.randint(8 * length, (60,), generator=generator).tolist()]:
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        if isinstance(found := loaded(folder), str):
            assert "\n" not in found
            refusals += 1
        else:
            assert all(torch.equal(value, wanted[name]) for name, value in found.state_dict().items())
    assert refusals > 40


def test_nothing_is_unpickled(stored, tmp_path, monkeypatch):
    """Not even where a pickle lies beside the weights, or bears their name."""
    import pickle

    class Bomb:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    folder = shutil.copytree(stored("mamba")[1], tmp_path / "spoilt")
    bomb = pickle.dumps(Bomb())
    for file in ("pytorch_model.bin", "tokenizer.pkl", "training_args.bin"):
        (folder / file).write_bytes(bomb)
    hub.load(folder)
    (folder / "model.safetensors").write_bytes(bomb)
    refused("model.safetensors is damaged or cut short", folder)
    torch.save({"weight": Bomb()}, folder / "model.safetensors")
    refused("model.safetensors is damaged or cut short", folder)
    assert not (tmp_path / "ran").exists()


def test_damaged_weights(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for end in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:end])
        refused(f"{path} is damaged or cut short", folder)
    path.write_bytes(whole)
    weights = load_file(path)
    weights["backbone.norm_f.weight"] = weights["backbone.norm_f.weight"].to(torch.int8)
    save_file(weights, path)
    refused("backbone.norm_f.weight is I8, expected one of", folder)


def test_missing_and_left_over_weights_are_all_named(folder):
    weights = load_file(folder / "model.safetensors")
    gone = ["backbone.layers.0.mixer.D", "backbone.norm_f.weight"]
    save_file({**weights, "more": torch.ones(1)}, folder / "model.safetensors")
    refused("has the extra weights more; expected the weights that config.json describes", folder)
    save_file({**weights, "two\nlines": torch.ones(1)}, folder / "model.safetensors")
    refused("has a weight named 'two\\nlines', expected a name that can be printed", folder)
    for name in gone:
        del weights[name]
    save_file({**weights, "more": torch.ones(1), "most": torch.ones(1)}, folder / "model.safetensors")
    refused(f"lacks {', '.join(gone)} and has the extra weights more, most", folder)


def test_damaged_shards(stored, tmp_path):
    folder = tmp_path / "shards"
    stored("mamba")[0].save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    text, last = index.read_text(), sorted(folder.glob("*.safetensors"))[-1]
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    refused(f"{last} is damaged or cut short", folder)
    last.unlink()
    refused(f"{last} does not exist, but {index.name} names it; copy it again", folder)
    last.write_bytes(whole)
    name, file = next(item for item in json.loads(text)["weight_map"].items() if item[1] != last.name)
    for wrong, message in (
        (
            text.replace(f'"{name}": "{file}"', f'"{name}": "{last.name}"'),
            f"{file} holds {name!r}, but {index.name} does not say so",
        ),
        (text.replace(f'"{name}"', '"another"'), f"{file} does not hold 'another', but {index.name} says that it does"),
    ):
        index.write_text(wrong)
        refused(f"{message}; copy the checkpoint again", folder)
    index.write_text(text)
    shutil.copyfile(last, folder / file)
    refused(f", but {index.name} ", folder)
    for wrong in ("{", "[]", "{}", '{"weight_map": [1]}', "[" * 100_000):
        index.write_text(wrong)
        refused(f"{index} is damaged, expected JSON with a weight_map; copy it again", folder)
    for wrong in ("../else.safetensors", "/else.safetensors", "..", "", "a\x00.safetensors", "pytorch_model.bin"):
        index.write_text(text.replace(last.name, json.dumps(wrong)[1:-1]))
        refused(f"{index} names {wrong!r}, expected safetensors files in the same folder", folder)


def test_folders_that_are_none(folder, tmp_path):
    refused("does not exist; name a folder", tmp_path / "nothing")
    refused("is a file, expected a folder", folder / "config.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused("has pickled weights alone (pytorch_model.bin), expected model.safetensors", folder)
    (folder / "pytorch_model.bin").unlink()
    refused("has no weights, expected model.safetensors", folder)
    for text, message in (("{", "is damaged"), ("[" * 100_000, "is damaged"), ("[1]", "holds a list")):
        (folder / "config.json").write_text(text)
        refused(message, folder)
    (folder / "config.json").unlink()
    refused("config.json does not exist; name a folder that transformers has saved", folder)


def test_names_go_to_the_hub(stored, monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    calls = []
    fetch = lambda name, **options: calls.append((name, options)) or str(stored("mamba")[1])  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert isinstance(hub.load("owner/name-1.0", revision="main"), LanguageModel)
    patterns = ["*.json", "config.yaml", "*.safetensors"]
    assert calls == [("owner/name-1.0", {"revision": "main", "allow_patterns": patterns})]

    def fail(name, **_):
        raise huggingface_hub.errors.OfflineModeIsEnabled("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused("owner/name is not a folder, and the hub does not give it: no", "owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("is not a folder, and only huggingface_hub can download it; pip install huggingface_hub", "owner/name")


def test_save_refuses_what_transformers_has_not(stored, tmp_path):
    def unsaved(message, model, **options):
        with pytest.raises(CheckpointError) as caught:
            hub.save(model, tmp_path / "out", **options)
        assert message in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    unsaved(
        "the model is built of LRU and GatedMLP, expected a model that transformers has: falcon_mamba, llama, mamba",
        LanguageModel(9, Stack(8, 1, "lru")),
    )
    unsaved("the model is built of Mamba and GatedMLP, expected a model", LanguageModel(9, Stack(8, 1, "mamba")))
    plain = {"channel_mixer": "none"}
    heads = {"layer_options": {"num_heads": 2}}
    for stack in (
        Stack(8, 1, "mamba", own_norm=True, **plain),
        Stack(8, 1, "attention", own_norm=True, **heads),
        Stack(8, 1, "attention", two_hop=True, **heads),
    ):
        unsaved("the model is built of", LanguageModel(9, stack))
    unsaved("differs from MambaForCausalLM", LanguageModel(9, Stack(8, 1, "mamba", **plain), embedding_norm=True))
    unsaved("expand is 1.5", LanguageModel(9, Stack(8, 1, "mamba", layer_options={"expand": 1.5}, **plain)))
    unsaved(
        "norm_eps of the layers is", LanguageModel(9, Stack(8, 1, "mamba2", layer_options={"head_dim": 4}, **plain))
    )
    rwkv = {"channel_mixer": "rwkv4", "norm": "layernorm"}
    unsaved(
        "layer_norm_epsilon is 1e-06, expected 1e-05",
        LanguageModel(9, Stack(8, 1, "rwkv4", **rwkv), embedding_norm=True),
    )
    wide = Stack(8, 1, "rwkv4", norm_eps=1e-5, residual_in_float32=True, **rwkv)
    unsaved("differs from RwkvForCausalLM", LanguageModel(9, wide, embedding_norm=True))
    griffin = {"layer_options": {"hawk": {"num_heads": 2, "width": 8}, "window_attention": {"num_heads": 1}}}
    griffin |= {"norm": "zero_centered_rmsnorm"}

    def model(depth, **head):
        return LanguageModel(9, Stack(8, depth, "griffin", **griffin), **{"logit_cap": 1.0, **head})

    unsaved("num_heads of the layers is 1 and 2, expected one number", model(3))
    griffin["layer_options"]["window_attention"] = {"num_heads": 2}
    griffin["channel_options"] = {"bias": True, "activation": "gelu_tanh"}
    unsaved("differs from RecurrentGemmaForCausalLM", model(3))
    griffin_model = model(6, embedding_scale=2.828125)
    griffin_model.stack.blocks[5].mixer.reach = 7
    unsaved("differs from RecurrentGemmaForCausalLM", griffin_model)
    griffin_model.stack.blocks[5].mixer.reach = 1024
    hub.save(griffin_model, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    unsaved("logits_soft_cap is None, expected", model(3, embedding_scale=2.828125, logit_cap=None))
    mamba = hub.load(stored("mamba")[1])
    unsaved("is a rwkv, expected a mamba because of the model", mamba, like=stored("rwkv")[1])


def test_a_width_is_saved_however_it_was_given(tmp_path):
    """As a multiple of dim, and as a number of channels: the weights have the same shapes."""
    for name, options in (("expand", {"expand": 3}), ("size", {"hidden_dim": 24})):
        model = LanguageModel(
            9, Stack(8, 1, "attention", layer_options={"num_heads": 2, "max_length": 64}, channel_options=options)
        )
        hub.save(model, tmp_path / name)
        torch.testing.assert_close(hub.load(tmp_path / name)(tokens(1) % 9)[0], model(tokens(1) % 9)[0])


def test_save_is_whole_or_not_at_all(stored, tmp_path, monkeypatch):
    model = hub.load(stored("mamba")[1])
    (tmp_path / "used").mkdir()
    hub.save(model, tmp_path / "used")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        hub.save(model, tmp_path / "used")

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoints, "save_file", fail)
    with pytest.raises(CheckpointError, match="cannot be written: disk full"):
        hub.save(model, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A Mamba over bytes, with a tokenizer of one token a byte and an end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("speaker") / "mamba"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)} | {"<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    made("mamba", num_hidden_layers=1, vocab_size=257, eos_token_id=256).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path, tokenizer


@pytest.mark.parametrize("name", formats.names())
def test_generate_with_a_hub_model(name, speaker, tmp_path, capfdbinary):
    path, tokenizer = tmp_path, speaker[1]
    theirs = made(name, vocab_size=257, eos_token_id=256)
    theirs.save_pretrained(path)
    tokenizer.save_pretrained(path)

    def said(*options):
        assert main(["generate", "--hub", str(path), "--temperature", "0", *options]) == 0
        return capfdbinary.readouterr().out.decode()

    prompt = "añ €"
    capfdbinary.readouterr()
    read = tokenizer(prompt, return_tensors="pt")["input_ids"]
    wanted = theirs.generate(read, max_new_tokens=20, do_sample=False)[0]
    assert said("--prompt", prompt, "--tokens", "20") == tokenizer.decode(wanted, skip_special_tokens=True) + "\n"
    assert said("--tokens", "3")


def test_generate_ends_at_the_end(speaker, tmp_path, capfdbinary):
    path = shutil.copytree(speaker[0], tmp_path / "ending")
    weights = load_file(path / "model.safetensors")
    weights["backbone.embeddings.weight"] = torch.zeros(257, 16)
    weights["backbone.embeddings.weight"][:, 0] = 1
    weights["backbone.embeddings.weight"][256] = 100  # always the likeliest
    weights["backbone.norm_f.weight"] = torch.ones(16)
    weights["backbone.layers.0.mixer.out_proj.weight"] = torch.zeros(16, 32)
    save_file(weights, path / "model.safetensors")
    assert main(["generate", "--hub", str(path), "--prompt", "x", "--temperature", "0", "--tokens", "0"]) == 0
    assert capfdbinary.readouterr().out == b"x\n"


def test_characters_come_out_whole(speaker):
    _, tokenizer = speaker
    text = "a ñ€𝄞 end\n" * 3
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > len(text)
    for start in (0, 1, len(ids)):
        pieces = list(whole_characters(tokenizer.decode, ids[:start], iter(ids[start:])))
        assert "".join(pieces) == text[start if start < 2 else len(text) :]
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert sum(map(bool, pieces)) == len(text[start if start < 2 else len(text) :])
    cut = tokenizer("€")["input_ids"][:2]
    assert "".join(whole_characters(tokenizer.decode, [], iter(cut))) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "neither a run nor --hub is given, expected exactly one of them; name a run folder, or --hub PATH"),
        (["RUN", "--hub", "b"], "a run and --hub are both given, expected exactly one of them"),
        (["RUN", "--tokens", "3"], "tokens is 3, but a run generates bytes or steps; give --bytes or --steps instead"),
        (["--hub", "a", "--bytes", "3"], "bytes is 3, but a model of --hub generates tokens; give --tokens"),
        (["--hub", "a", "--tokens", "-3"], "tokens is -3, expected at least 0"),
        (["--hub", "./nothing"], "nothing does not exist; name a folder"),
        (["--hub", "FOLDER"], "has no tokenizer, expected tokenizer.json"),
    ],
)
def test_generate_refuses(stored, options, message, tmp_path, capfd):
    (tmp_path / "config.yaml").write_text("", encoding="utf-8")
    paths = {"FOLDER": str(stored("mamba")[1]), "RUN": str(tmp_path)}
    assert main(["generate", *(paths.get(option, option) for option in options)]) == 2
    assert message in capfd.readouterr().err

"""Language models and classifiers over every layer; sampling against distributions worked out by hand."""

import copy
import gc
import itertools
import math
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from scanl import layers
from scanl.errors import CheckpointError, ConfigError, DivergenceError, ShapeError
from scanl.layers import Layer
from scanl.layers import state as states
from scanl.models import (
    Channels,
    Features,
    Forecaster,
    GatedMLP,
    LanguageModel,
    Saved,
    SequenceClassifier,
    SequenceLabeler,
    SequenceRegressor,
    Stack,
    Tokens,
)
from scanl.models.block import make_norm
from scanl.models.decoding.sampling import distribution, sample
from scanl.models.saving import recorded
from scanl.options import options as options_of

COVERS = [
    "models/block", "models/heads/classifier", "models/embedding", "models/decoding/generation", "models/inputs",
    "models/heads/language_model", "models/pooling", "models/reader", "models/decoding/sampling", "models/stack",
]  # fmt: skip

pytestmark = pytest.mark.cells_by_loop("name")

VOCAB, DIM = 11, 12
CAUSAL = [name for name in layers.names(presets=False) if not layers.get(name).bidirectional]
PATTERN = ("hawk", "hgrn", "lru")
PATTERN_OPTIONS = {"hawk": {"num_heads": 2, "width": 8}, "lru": {"state_dim": 5}}


def language_model(layer="hawk", seed=0, **options):
    torch.manual_seed(seed)
    if isinstance(layer, str):
        options.setdefault("layer_options", dict(layers.get(layer).sample))
    head = {name: options.pop(name) for name in signature(LanguageModel.__init__).parameters.keys() & options.keys()}
    return LanguageModel(VOCAB, Stack(DIM, options.pop("depth", 3), layer, **options), **head).double()


def tokens(*shape, seed=1):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def hybrid(**options):
    return language_model(PATTERN, depth=5, layer_options=PATTERN_OPTIONS, **options)


def assert_same_state(actual, expected, **tolerance):
    for (place, a), (also, b) in zip(states.leaves(actual), states.leaves(expected), strict=True):
        assert place == also
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("name", CAUSAL)
def test_pieces_and_tokens_equal_the_whole(name):
    model, x = language_model(name, depth=2), tokens(2, 9)
    whole, last = model(x)
    assert whole.shape == (2, 9, VOCAB)
    state, logits = model.init_state(2), []
    for start, end in itertools.pairwise([0, 4, 4, 5, 6, 9]):
        y, state = model(x[:, start:end], state)
        logits.append(y)
    torch.testing.assert_close(torch.cat(logits, 1), whole)
    assert_same_state(state, last)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"channel_mixer": "none"},
        {"tie_embeddings": True},
        {"norm": "layernorm"},
        {"embedding_norm": True, "norm_eps": 0.1},
        {"norm": "zero_centered_rmsnorm"},
        {"embedding_scale": 3.0, "logit_cap": 0.5, "channel_options": {"activation": "gelu_tanh"}},
    ],
)
def test_hybrid_stack_equals_itself_token_by_token(options):
    model, x = hybrid(**options), tokens(2, 6)
    assert [type(block.mixer).name for block in model.stack.blocks] == ["hawk", "hgrn", "lru", "hawk", "hgrn"]
    whole, _ = model(x)
    state, logits = None, []
    for t in range(6):
        y, state = model(x[:, t : t + 1], state)
        logits.append(y)
    torch.testing.assert_close(torch.cat(logits, 1), whole)


def test_a_pattern_is_called_by_its_name():
    options = {"hawk": {"num_heads": 2}, "window_attention": {"num_heads": 2, "window": 3}}
    torch.manual_seed(1)
    named = LanguageModel(11, Stack(8, 4, "griffin", layer_options=options))
    torch.manual_seed(1)
    written = LanguageModel(11, Stack(8, 4, ("hawk", "hawk", "window_attention"), layer_options=options))
    assert [type(block.mixer).name for block in named.stack.blocks] == ["hawk", "hawk", "window_attention", "hawk"]
    tokens = torch.randint(11, (2, 6))
    torch.testing.assert_close(named(tokens), written(tokens), rtol=0, atol=0)
    assert len(LanguageModel(11, Stack(8, 4, ("griffin", "lru"), layer_options=options)).stack.blocks) == 4
    for wrong, message in (
        ("grifin", r"unknown layer 'grifin'; did you mean 'griffin'\?"),
        ("hwak", r"unknown layer 'hwak'; did you mean 'hawk'\?"),
    ):
        with pytest.raises(ConfigError, match=message):
            LanguageModel(11, Stack(8, 2, wrong))
    with pytest.raises(ConfigError, match=r"unknown layer in layer_options 'lru'; known: hawk, window_attention"):
        LanguageModel(11, Stack(8, 3, "griffin", layer_options={"lru": {}}))


def test_norm_options():
    model, x = hybrid(embedding_norm=True, norm_eps=0.1), tokens(2, 6)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert len(norms) == 2 * 5 + 2
    assert all(norm.eps == 0.1 for norm in norms)
    embedded = model.embedding(x)
    normed = embedded / (embedded.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(model(x)[0], F.linear(model.stack(normed)[0], model.head.weight))


def test_scaled_embeddings_and_capped_logits():
    model, x = hybrid(embedding_scale=3.0, logit_cap=0.5), tokens(2, 6)
    logits = 50 * F.linear(model.stack(3 * model.embedding(x))[0], model.head.weight)
    model.head.weight.data *= 50
    capped = 0.5 * (logits / 0.5).tanh()
    assert (logits - capped).abs().max() > 1
    torch.testing.assert_close(model(x)[0], capped)
    torch.testing.assert_close(model.next_logits(x)[0], capped[:, -1])
    assert model.bfloat16()(x)[0].dtype == torch.bfloat16
    assert "embedding_scale=3.0, logit_cap=0.5" in repr(model)
    assert "logit_cap" not in repr(hybrid())


def test_the_weight_of_a_zero_centered_norm_is_added_to_one():
    norm = make_norm("zero_centered_rmsnorm", 4, 0.1)
    x = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    root = math.sqrt(30 / 4 + 0.1)
    torch.testing.assert_close(norm(x), x / root)
    norm.weight.data[:] = torch.tensor([0.0, 1.0, -1.0, 0.5])
    torch.testing.assert_close(norm(x), torch.tensor([[1.0, -4.0, 0.0, 6.0]]) / root)
    half = make_norm("zero_centered_rmsnorm", 4, 0.1).to(torch.bfloat16)
    half.weight.data += 2**-8  # 1 + 2^-8 is 1 in bfloat16
    assert torch.equal(half(x.to(torch.bfloat16)), (x / root * (1 + 2**-8)).to(torch.bfloat16))
    assert not torch.equal(half(x.to(torch.bfloat16)), (x / root).to(torch.bfloat16))


def test_gated_mlp_by_hand():
    x = torch.tensor([[[2.0]]])
    for activation, wanted in (("silu", 2 / (1 + math.exp(-2))), ("gelu_tanh", 1.9545977)):
        mlp = GatedMLP(1, 1, bias=True, activation=activation)
        for linear, weight, bias in ((mlp.gate, 3.0, -4.0), (mlp.up, 5.0, 1.0), (mlp.down, 7.0, 0.5)):
            linear.weight.data.fill_(weight)
            linear.bias.data.fill_(bias)
        torch.testing.assert_close(mlp(x)[0], torch.tensor([[[7 * wanted * 11 + 0.5]]]))  # f(3*2-4), 5*2+1


@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({}, 20),
        ({"expand": 1.55}, 15),
        ({"expand": 1.55, "multiple_of": 8}, 16),
        ({"expand": 1.6, "multiple_of": 8}, 16),
        ({"hidden_dim": 7}, 7),
    ],
)
def test_hidden_features_of_the_gated_mlp(options, hidden):
    mlp = GatedMLP(10, **options)
    assert [mlp.gate.out_features, mlp.up.out_features, mlp.down.in_features] == [hidden] * 3


def test_residual_in_float32_keeps_what_bfloat16_would_drop():
    torch.manual_seed(0)
    stacks = [Stack(8, 2, "lru", residual_in_float32=wide).to(torch.bfloat16) for wide in (False, True)]
    stacks[1].load_state_dict(stacks[0].state_dict())
    full, x, streams = Stack(8, 2, "lru"), 1000 * torch.randn(1, 4, 8).to(torch.bfloat16), []
    full.load_state_dict(stacks[0].state_dict())
    for stack in (*stacks, full):
        stack.blocks[1].register_forward_hook(lambda _, args, result: streams.append(result[0]))
        assert stack(x.to(stack.norm.weight.dtype))[0].dtype == stack.norm.weight.dtype
    narrow, wide, wanted = streams
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert (wide - wanted).norm() < 0.1 * (narrow.float() - wanted).norm()


def ragged(side):
    """Three rows of 3, 6 and 1 tokens in six places, and their mask."""
    steps, lengths = torch.arange(6), torch.tensor([3, 6, 1])[:, None]
    return tokens(3, 6), (steps >= 6 - lengths) if side == "left" else (steps < lengths)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_each_alone(side):
    model, (x, mask) = hybrid(), ragged(side)
    logits, last = model(x, mask=mask)
    assert not logits[~mask].any()
    for i in range(3):
        alone, state = model(x[i : i + 1, mask[i]])
        torch.testing.assert_close(logits[i, mask[i]], alone[0])
        assert_same_state(states.index(last, [i]), state)


def test_packed_sequences_equal_each_alone():
    model, x = hybrid(), tokens(1, 9)
    logits, last = model(x, cu_seqlens=torch.tensor([0, 4, 4, 9]))
    for n, (start, end) in enumerate([(0, 4), (4, 4), (4, 9)]):
        alone, state = model(x[:, start:end])
        torch.testing.assert_close(logits[:, start:end], alone)
        assert_same_state(states.index(last, [n]), state)


def test_a_state_that_begins_anew_equals_the_pieces():
    """In a model of tokens, padded on the left, and in a stack, whose layers hand on a memo; and by steps."""
    model, x = hybrid(), tokens(2, 7)
    stack = Stack(DIM, 2, "rwkv7", layer_options=layers.get("rwkv7").sample)
    labeler = SequenceLabeler(3, stack, Features(4))
    seen, mask = torch.randn(2, 7, 4), torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1] * 7]).bool()
    starts = torch.tensor([[0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0]]).bool()
    for run, read, more in ((model, x, {}), (model, x, {"mask": mask}), (labeler, seen, {"mask": mask})):
        _, before = run(read[:, :3])
        y, last = run(read, before, starts=starts, **more)
        first = 1 if more else 0
        for row, cuts in enumerate(((first, 3, 7), (0, 5, 7))):
            at = slice(row, row + 1)
            for start, end in itertools.pairwise(cuts):
                state = states.index(before, [0]) if (row, start) == (0, first) else None
                alone, state = run(read[at, start:end], state)
                torch.testing.assert_close(y[at, start:end], alone)
            assert_same_state(states.index(last, [row]), state)
    expected, _ = stack(torch.ones(2, 7, DIM), starts=starts)
    torch.testing.assert_close(expected[0, 3:], stack(torch.ones(1, 4, DIM))[0][0])
    _, state = model(x[:, :2])
    y, last = model.step(x[:, 2], state, starts=starts[:, 0])
    alone, end = model.step(x[1:, 2], None)
    torch.testing.assert_close(y[1:], alone)
    assert_same_state(states.index(last, [1]), end)
    torch.testing.assert_close(y[:1], model.step(x[:1, 2], states.index(state, [0]))[0])


@pytest.mark.parametrize("tie", [False, True])
def test_saved_and_loaded_continues_exactly(tie, tmp_path):
    model, x = hybrid(tie_embeddings=tie), tokens(2, 8)
    _, state = model(x[:, :5])
    expected, _ = model(x[:, 5:], state)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")  # refuses tensors that share memory
    states.save(state, tmp_path / "state.safetensors")
    other = hybrid(tie_embeddings=tie, seed=7)
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    read = states.load(tmp_path / "state.safetensors", other.init_state(1))
    assert torch.equal(other(x[:, 5:], read)[0], expected)
    torch.save(state, tmp_path / "state.pt")
    assert_same_state(torch.load(tmp_path / "state.pt", weights_only=True), state)


def test_a_copy_of_a_tied_stack_shares_its_own_gamma():
    import copy

    model = language_model("hgrn")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.stack.blocks[0].mixer.gamma[1] += 5
    x = tokens(1, 4)
    assert not torch.equal(twin(x)[0], model(x)[0])
    assert sum("gamma" in name for name, _ in model.named_parameters()) == 1


def test_a_block_adds_to_its_input():
    block, x = hybrid().stack.blocks[0], torch.randn(2, 3, DIM, dtype=torch.float64)
    after = x + block.mixer(block.mixer_norm(x))[0]
    after = after + block.channel(block.channel_norm(after))[0]
    torch.testing.assert_close(block(x)[0], after)
    up, gate = block.channel.up.weight, block.channel.gate.weight
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ block.channel.down.weight.T
    torch.testing.assert_close(block.channel(x)[0], expected)


@pytest.mark.parametrize("name", CAUSAL)
def test_mixed_precision_trains_and_streams(name):
    model, x = language_model(name, depth=2).float(), tokens(2, 6)
    with torch.no_grad():
        exact, _ = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = model(x)
        state = None
        with torch.no_grad():
            for t in range(6):
                y, state = model(x[:, t : t + 1], state)
            packed, _ = model(x.view(1, 12), cu_seqlens=torch.tensor([0, 6, 12]))
    logits.float().square().mean().backward()
    if "every_layer_trains_under_autocast" not in layers.get(name).excused:
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        half, _ = model.bfloat16()(x)  # wholly in bfloat16
    bound = 2 * ((half - exact).abs().max() + torch.finfo(torch.bfloat16).eps * exact.abs().max())
    for other in (logits, torch.cat([logits[:, :5], y], 1), packed.view_as(logits)):
        assert (other - exact).abs().max() <= bound


def test_initialisation():
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(96, 2, "hawk", channel_options={"expand": 3}))
    for weight in (model.embedding.weight, model.head.weight):
        assert abs(weight.std() - 0.02) < 5 * 0.02 / math.sqrt(2 * weight.numel())
    for block in model.stack.blocks:  # Hawk has 2/L of the variance, L = 2; the channel mixer is one of four writes
        for projection, writes in ((block.mixer.linear_out, 2 / 2), (block.channel.down, 2 * 2)):
            std = projection.in_features**-0.5 / math.sqrt(writes)
            assert abs(projection.weight.std() - std) < 5 * std / math.sqrt(2 * projection.weight.numel())
        assert block.channel.up.weight.shape == (288, 96)
    assert LanguageModel(256, Stack(96, 2, "hawk"), tie_embeddings=True).head is None
    mlp = GatedMLP(8, bias=True)
    assert not any(linear.bias.any() for linear in (mlp.gate, mlp.up, mlp.down))


def test_it_learns():
    torch.manual_seed(0)
    model = LanguageModel(VOCAB, Stack(16, 2, "hawk", layer_options={"num_heads": 2}))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    x = (torch.arange(24) % 5)[None] + torch.arange(4)[:, None]
    for _ in range(40):
        logits, _ = model(x[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.3
    generated = torch.stack(list(model.generate(x[:, :10], max_new_tokens=10, temperature=0)), 1)
    assert torch.equal(generated, x[:, 10:20])


def test_greedy_generation_is_the_likeliest_token_of_the_whole():
    model, x = hybrid(), tokens(2, 4)
    generated = torch.stack(list(model.generate(x, max_new_tokens=6, temperature=0)), 1)
    for _ in range(6):
        x = torch.cat([x, model(x)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(generated, x[:, 4:])
    assert generated.dtype == torch.int64


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_generate_as_each_alone(side):
    model, (x, mask) = hybrid(), ragged(side)
    together = torch.stack(list(model.generate(x, mask=mask, max_new_tokens=5, temperature=0)), 1)
    for i in range(3):
        alone = torch.stack(list(model.generate(x[i : i + 1, mask[i]], max_new_tokens=5, temperature=0)), 1)
        assert torch.equal(together[i], alone[0])


def test_a_conversation_is_put_down_and_picked_up():
    model, x = hybrid(), tokens(2, 4)
    options = {"temperature": 0.8, "top_k": 5, "top_p": 0.9}
    whole = list(itertools.islice(model.generate(x, seed=3, **options), 12))
    first = model.generate(x, seed=3, **options)
    assert torch.equal(first.pending, x)
    parts = list(itertools.islice(first, 5))
    assert torch.equal(first.pending, parts[-1][:, None])
    state = first.state
    parts += itertools.islice(model.generate(first.pending, state, seed=first.generator, **options), 7)
    assert torch.equal(torch.stack(parts), torch.stack(whole))
    # The state has read everything but the pending token, and is fit for training.
    expected = model(torch.cat([x, torch.stack(parts[:4], 1)], 1))[1]
    assert_same_state(state, expected)
    model(first.pending, state)[0].sum().backward()
    assert next(model.parameters()).grad is not None


def test_tokens_are_those_that_torch_draws():
    logits = 3 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    for options in (dict[str, float](), {"temperature": 0.5, "top_p": 0.9}):
        ours, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        expected = torch.multinomial(distribution(logits, **options), 1, generator=theirs)[:, 0]
        assert torch.equal(sample(logits, **options, generator=ours), expected)
    for bad in (math.nan, math.inf):
        with pytest.raises(DivergenceError, match=f"the largest logit of the next token is {bad}, expected a finite"):
            sample(logits.index_fill(1, torch.tensor([4]), bad))


def test_a_seed_decides():
    model, x = hybrid(), tokens(3, 2)
    runs = [torch.stack(list(model.generate(x, seed=seed, max_new_tokens=20))) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_callback_stops_it():
    model, calls = hybrid(), []

    def stop(token, n):
        calls.append((token.shape, n))
        return n == 3

    assert len(list(model.generate(tokens(2, 2), stop=stop, max_new_tokens=9))) == 3
    assert calls == [((2,), n) for n in (1, 2, 3)]
    assert list(model.generate(tokens(2, 2), max_new_tokens=0)) == []


def sizes_over_time() -> set:
    """Living tensors and bytes of state after windows of generation; one entry when nothing grows."""
    model = hybrid()
    generation = model.generate(tokens(1, 3), seed=0)

    def living():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    for _ in range(50):  # what is made once and kept
        next(generation)
    sizes = set()
    for _ in range(3):
        for _ in range(50):
            next(generation)
        sizes.add((living(), sum(leaf.untyped_storage().nbytes() for _, leaf in states.leaves(generation._state))))
    return sizes


def test_nothing_grows():
    """In a process of its own: what other tests leave behind is collected at any time."""
    code = "import test_models; print(len(test_models.sizes_over_time()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("1", 0), done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_distribution_at_its_borders(dtype):
    """The limits of a softmax: at temperature 0 the most likely tokens share all, and no logit is too large."""
    logits = torch.tensor([[3.0, 5, 5, -torch.inf], [7, -2, 7, 7], [-9, -9.5, -1e30, 0]], dtype=dtype)
    shares = torch.tensor([[0, 0.5, 0.5, 0], [1 / 3, 0, 1 / 3, 1 / 3], [0, 0, 0, 1]])
    for temperature in (1e-38, 1e-40, 1e-46, 5e-324):
        torch.testing.assert_close(distribution(logits, temperature), shares)
    for top_p in (1e-38, 1e-46, 5e-324):
        assert torch.equal(distribution(logits, top_p=top_p).amax(-1), torch.ones(3))
        assert torch.equal(distribution(logits, 1e-46, 1, top_p).amax(-1), torch.ones(3))
    large = torch.finfo(dtype).max
    far = torch.tensor([0.0, large, -large, large], dtype=dtype)
    torch.testing.assert_close(distribution(far), torch.tensor([0, 0.5, 0, 0.5]))
    # e^4 / (e^4 + 1) at temperature 1/4, whatever is added to both
    base = 2.0**40 if dtype == torch.float64 else 64.0  # where both are equal in float32
    shifted = torch.tensor([base + 1, base], dtype=dtype)
    torch.testing.assert_close(distribution(shifted, 0.25)[0], torch.tensor(math.exp(4) / (math.exp(4) + 1)))


def test_distribution_by_hand():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    torch.testing.assert_close(distribution(logits), torch.tensor([0.5, 0.25, 0.125, 0.125]))
    # temperature 1/2 squares: 1/4, 1/16, 1/64, 1/64 of a sum 22/64
    torch.testing.assert_close(distribution(logits, 0.5), torch.tensor([16, 4, 1, 1]) / 22)
    torch.testing.assert_close(distribution(logits, top_k=2), torch.tensor([2, 1, 0, 0]) / 3)
    torch.testing.assert_close(distribution(logits, top_k=1), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(distribution(logits, top_k=9), logits.exp())
    # 0.5 does not reach 0.6, 0.5 + 0.25 does
    torch.testing.assert_close(distribution(logits, top_p=0.6), torch.tensor([2, 1, 0, 0]) / 3)
    torch.testing.assert_close(distribution(logits, top_p=0.5), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(distribution(logits, top_p=1e-6), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(distribution(logits, top_p=1.0), logits.exp())
    # the nucleus is of what the temperature and the k leave: 2/3, 1/3
    torch.testing.assert_close(distribution(logits, top_k=2, top_p=0.6), torch.tensor([1.0, 0, 0, 0]))
    # rows by themselves, whatever their order
    rows = torch.stack([logits, logits.flip(0)])
    torch.testing.assert_close(distribution(rows, top_p=0.6), torch.tensor([[2, 1, 0, 0], [0, 0, 1, 2]]) / 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_sampled_in_float32(dtype):
    logits = torch.linspace(-4, 4, 300).to(dtype)
    found = distribution(logits, 0.7, top_p=0.99)
    assert found.dtype == torch.float32
    assert torch.equal(found, distribution(logits.float(), 0.7, top_p=0.99))


def test_samples_follow_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.bincount(sample(logits, generator=generator), minlength=4) / 20_000
    expected = logits[0].exp()
    assert ((drawn - expected).abs() <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()
    assert torch.equal(sample(logits, 0), torch.zeros(20_000, dtype=torch.int64))


@pytest.mark.parametrize("pool", ["mean", "last"])
@pytest.mark.parametrize("layer", ["hawk", "lru"])
def test_classifier_reads_pieces_as_the_whole(pool, layer):
    options = {"layer_options": dict(layers.get(layer).sample)}
    model = SequenceClassifier(3, Stack(DIM, 2, layer, **options), Features(4), pool=pool).double()
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    whole, last = model(x)
    assert whole.shape == (2, 3)
    state = model.init_state(2)
    for start, end in itertools.pairwise([0, 0, 2, 3, 7, 7]):
        logits, state = model(x[:, start:end], state)
    torch.testing.assert_close(logits, whole)
    assert_same_state(state, last)


@pytest.mark.parametrize("layer", ["lru", "s4d", "s5", "mamba"])
def test_steps_of_any_length_reach_the_layers(layer):
    options = {"layer_options": dict(layers.get(layer).sample)}
    model = SequenceClassifier(3, Stack(DIM, 2, layer, **options), Tokens(VOCAB)).double()
    x, mask = ragged("left")
    spans = torch.rand(x.shape, dtype=torch.float64) + 0.5
    y = model.input(x)
    for block in model.stack.blocks:
        z, _ = block.mixer(block.mixer_norm(y), timespans=spans)
        y = y + z
        y = y + block.channel(block.channel_norm(y))[0]
    torch.testing.assert_close(model.stack(model.input(x), timespans=spans)[0], model.stack.norm(y))
    logits, _ = model(x, mask=mask, timespans=spans)
    for i in range(3):
        alone, _ = model(x[i : i + 1, mask[i]], timespans=spans[i : i + 1, mask[i]])
        torch.testing.assert_close(logits[i], alone[0])
    assert not torch.allclose(logits, model(x, mask=mask)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pool", ["mean", "last"])
@pytest.mark.parametrize("layer", ["hawk", "bidirectional"])
def test_classifier_of_padded_rows(side, pool, layer):
    options = {"layer_options": dict(layers.get(layer).sample)}
    model = SequenceClassifier(3, Stack(DIM, 2, layer, **options), Tokens(VOCAB), pool=pool).double()
    x, mask = ragged(side)
    logits, _ = model(x, mask=mask)
    for i in range(3):
        torch.testing.assert_close(logits[i], model(x[i : i + 1, mask[i]])[0][0])
    packed, state = model(x[mask][None], cu_seqlens=torch.tensor([0, 3, 9, 10]))
    torch.testing.assert_close(packed, logits)
    if layer != "bidirectional":  # a sequence without new steps keeps its logits
        again, _ = model(x[:1, :2], state, cu_seqlens=torch.tensor([0, 0, 2, 2]))
        torch.testing.assert_close(again[[0, 2]], logits[[0, 2]])
        assert not torch.equal(again[1], logits[1])


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_classifier_that_has_read_nothing(pool):
    """The logits are those of a feature of zeros, whether the sequence is whole or packed beside others."""
    model = SequenceClassifier(3, Stack(DIM, 1, "lru"), Features(4), pool=pool)
    x = torch.randn(1, 5, 4)
    assert torch.equal(model(x[:, :0])[0], model.head.bias[None])
    logits, _ = model(x, cu_seqlens=torch.tensor([0, 0, 5]))
    torch.testing.assert_close(logits, torch.cat([model.head.bias[None], model(x)[0]]))


def test_what_begins_has_no_state(monkeypatch):
    """A layer that starts a sequence gets None: zeros would be computed with, which takes S4D three times as long."""
    given, forward = [], layers.get("lru").forward

    def watched(self, x, state=None, **options):
        given.append(state)
        return forward(self, x, state, **options)

    monkeypatch.setattr(layers.get("lru"), "forward", watched)
    x = torch.randn(2, 5, 3)
    for model in (
        SequenceClassifier(3, Stack(DIM, 2, "lru"), Features(3)),
        Forecaster(1, Stack(DIM, 2, "lru"), Channels(target=3)),
        LanguageModel(VOCAB, Stack(DIM, 2, "lru")),
    ):
        model(torch.zeros(2, 5, dtype=torch.int64) if isinstance(model, LanguageModel) else x)
    assert given == [None] * 6


def test_classifier_sums_in_float32():
    """A sum in bfloat16 would stay at 256 times its first step."""
    model = SequenceClassifier(3, Stack(DIM, 1, "lru"), Features(4)).to(torch.bfloat16)
    x = torch.randn(1, 600, 4).to(torch.bfloat16)
    _, state = model(x)
    outputs, _ = model.stack(model.input(x))
    torch.testing.assert_close(state.pooled, outputs.float().sum(1))


def test_classifier_pools_the_stack_s_output():
    model = SequenceClassifier(3, Stack(DIM, 1, "lru"), Features(DIM)).double()
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    y, _ = model.stack(model.input(x))
    torch.testing.assert_close(model(x)[0], model.head(y.mean(1)))
    model.pool = "last"
    torch.testing.assert_close(model(x)[0], model.head(y[:, -1]))


@pytest.mark.cells_by_kernel
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")  # torch does so
def test_compiles_to_one_graph():
    torch.compiler.reset()
    model, x = language_model(PATTERN, layer_options=PATTERN_OPTIONS), tokens(2, 6)
    expected, state = model(x)
    logits, also = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(logits, expected)
    assert_same_state(also, state)


WRONG = [
    (lambda: language_model()(tokens(3)), ShapeError, r"tokens is torch.int64 \(3,\), expected integers \(B, T\)"),
    (lambda: language_model()(torch.zeros(1, 2)), ShapeError, r"tokens is torch.float32 \(1, 2\)"),
    (
        lambda: language_model()(tokens(1, 2), mask=torch.ones(1, 2).bool(), cu_seqlens=torch.tensor([0, 2])),
        ShapeError,
        "mask and cu_seqlens are both given",
    ),
    (lambda: language_model()(tokens(1, 2), starts=tokens(1, 2)), ShapeError, "language model: starts is torch.int64"),
    (
        lambda: language_model("lru")(tokens(2, 1), language_model("lru").init_state(1), starts=tokens(2, 1) >= 0),
        ShapeError,
        r"language model: state.0.mixer has shape \(1, 6\), expected \(2, 6\) because of starts",
    ),
    (lambda: language_model()(tokens(1, 2), mask=torch.ones(2, 2).bool()), ShapeError, r"expected torch.bool \(1, 2\)"),
    (lambda: language_model()(tokens(1, 2), mask=tokens(1, 2)), ShapeError, r"mask is torch.int64 \(1, 2\), expected"),
    (lambda: language_model().generate(tokens(1, 0)), ShapeError, r"prompt has shape \(1, 0\), expected \(B, T\)"),
    (
        lambda: language_model().generate(tokens(2, 2), mask=torch.tensor([[True, True], [False, False]])),
        ShapeError,
        "mask has a row without a token",
    ),
    (lambda: language_model().generate(tokens(1, 1), temperature=-1.0), ConfigError, "temperature is -1.0, expected"),
    (lambda: language_model().generate(tokens(1, 1), top_k=0), ConfigError, "top_k is 0, expected at least 1"),
    (lambda: language_model().generate(tokens(1, 1), top_p=0.0), ConfigError, r"top_p is 0.0, expected in \(0, 1\]"),
    (lambda: language_model("bidirectional"), ConfigError, "'bidirectional' is bidirectional, expected causal"),
    (lambda: LanguageModel(5, Stack(8, 1, "hwak")), ConfigError, r"unknown layer 'hwak'; did you mean 'hawk'\?"),
    (lambda: Stack(8, 0), ConfigError, "stack: depth is 0, expected at least 1"),
    (lambda: Stack(0, 1), ConfigError, "stack: dim is 0, expected at least 1"),
    (lambda: Stack(8, 1, ()), ConfigError, "stack: layer is an empty pattern, expected at least one layer"),
    (
        lambda: Stack(8, 1, "lru", layer_options={"rmax": 1}),
        ConfigError,
        r"option of lru 'rmax'; did you mean 'r_max'\?",
    ),
    (
        lambda: Stack(8, 2, ("lru", "hgrn"), layer_options={"hgrm": {}}),
        ConfigError,
        r"unknown layer in layer_options 'hgrm'; did you mean 'hgrn'\?",
    ),
    (lambda: Stack(8, 1, channel_mixer="gated"), ConfigError, r"channel mixer 'gated'; did you mean 'gated_mlp'\?"),
    (lambda: Stack(8, 1, channel_options={"expnd": 2}), ConfigError, r"option of gated_mlp 'expnd'; did you mean"),
    (lambda: Stack(8, 1, channel_options={"expand": 0}), ConfigError, "gated_mlp: expand is 0, expected more than 0"),
    (
        lambda: Stack(8, 1, channel_options={"activation": "gelu"}),
        ConfigError,
        r"gated_mlp: unknown activation 'gelu'; did you mean 'gelu_tanh'\?",
    ),
    (lambda: GatedMLP(8, hidden_dim=0), ConfigError, "hidden_dim is 0, expected at least 1"),
    (lambda: GatedMLP(8, multiple_of=0), ConfigError, "multiple_of is 0, expected at least 1"),
    (lambda: LanguageModel(5, Stack(8, 1), logit_cap=0.0), ConfigError, "logit_cap is 0.0, expected more than 0"),
    (lambda: Stack(8, 1, norm="rms"), ConfigError, r"unknown norm 'rms'; did you mean 'rmsnorm'\?"),
    (
        lambda: SequenceClassifier(2, Stack(8, 1), 3),
        ConfigError,
        r"classifier: inputs is 3, expected Tokens\(vocab_size",
    ),
    (
        lambda: SequenceClassifier(0, Stack(8, 1), Tokens(3)),
        ConfigError,
        "classifier: num_classes is 0, expected at le",
    ),
    (lambda: LanguageModel(5, "hawk"), ConfigError, "language model: stack is 'hawk', expected a stack of layers"),
    (lambda: LanguageModel(5, layers.LRU(8)), ConfigError, "stack is a LRU, expected a stack of layers, such as"),
    (
        lambda: LanguageModel(256, 128, 4),
        TypeError,
        r"LanguageModel: too many positional arguments; it is LanguageModel\(vocab_size: int, stack",
    ),
    (
        lambda: SequenceClassifier(2, Stack(8, 1), Features(2), pool="max"),
        ConfigError,
        "classifier: unknown pool 'max'; did you mean 'mean'",
    ),
    (
        lambda: SequenceClassifier(2, Stack(8, 1, "lru"), Features(2))(torch.zeros(1, 3)),
        ShapeError,
        r"x has shape \(1, 3\), expected \(B, T, 2\)",
    ),
    (
        lambda: SequenceClassifier(2, Stack(8, 1, "lru"), Tokens(2))(torch.zeros(1, 3)),
        ShapeError,
        r"x is torch.float32 \(1, 3\), expected integers",
    ),
    (
        lambda: SequenceClassifier(2, Stack(8, 1, "lru"), Features(2))(
            torch.zeros(1, 3, 2), timespans=torch.ones(1, 2)
        ),
        ShapeError,
        r"classifier: timespans is torch.float32 \(1, 2\), expected a floating dtype and \(1, 3\)",
    ),
    (
        lambda: Stack(8, 2, ("lru", "hawk"))(torch.zeros(1, 3, 8), timespans=torch.ones(1, 3)),
        ConfigError,
        r"block: timespans is given, expected none because Hawk takes none; layers that take them: .*lru, .*s4d, s5",
    ),
    (
        lambda: Stack(8, 2, "lru")(torch.zeros(1, 3, 8), Stack(8, 1, "lru").init_state(1)),
        ShapeError,
        "stack: state is a tuple of 1, expected None or the state that this stack returned, a BlockState for each of i",
    ),
    (
        lambda: Stack(8, 1, "lru")(torch.zeros(1, 3, 8), torch.zeros(1, 8)),
        ShapeError,
        "stack: state is a Tensor, expected None or the state",
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_use_is_refused(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()


SAVED = [
    LanguageModel(11, Stack(8, 2, ["lru", "hawk"], layer_options={"lru": {"r_min": 0.5}}, dropout=0.25), logit_cap=3.0),
    SequenceClassifier(3, Stack(8, 1, "gru", norm="layernorm"), Features(4), pool="last"),
    SequenceClassifier(3, Stack(8, 1, "mingru", channel_mixer="none"), Tokens(7)),
]


@pytest.mark.parametrize("model", SAVED, ids=lambda model: type(model).__name__)
def test_saved_and_loaded(model, tmp_path):
    """The class, the configuration and every weight; by the class itself or by what it is a kind of."""
    assert set(model.config) == set(signature(type(model).__init__).parameters) - {"self"}
    model.save(tmp_path / "a" / "b")
    for cls in (type(model), Saved):
        again = cls.load(tmp_path / "a" / "b")
        assert type(again) is type(model)
        assert recorded(again) == recorded(model)
        assert not again.training
        for (name, value), (same, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
            assert name == same
            torch.testing.assert_close(value, other, rtol=0, atol=0)


def test_loading_refuses(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing has no model\.safetensors; name a folder of `save`"):
        LanguageModel.load(tmp_path / "nothing")
    SAVED[1].save(tmp_path)
    with pytest.raises(CheckpointError, match="holds SequenceClassifier, expected LanguageModel"):
        LanguageModel.load(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="is damaged"):
        SequenceClassifier.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"save: .*file cannot be written"):
        SAVED[1].save(tmp_path / "file")


@pytest.mark.parametrize("make", [LanguageModel, SequenceClassifier])
def test_dropout_is_of_training_alone(make):
    """In training a half of what is added is left out and the rest doubled; in evaluation nothing changes."""
    more = {LanguageModel: (), SequenceClassifier: (Tokens(5),)}[make]
    model, plain = make(5, Stack(8, 1, dropout=0.5), *more), make(5, Stack(8, 1), *more)
    plain.load_state_dict(model.state_dict())
    tokens = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(model.eval()(tokens)[0], plain(tokens)[0], rtol=0, atol=0)
    assert not torch.equal(model.train()(tokens)[0], plain(tokens)[0])
    block, x = model.stack.blocks[0], torch.zeros(1, 1000, 8)
    block.mixer = _Ones(8)
    block.channel = None
    added = block(x)[0]
    assert set(added.unique().tolist()) == {0.0, 2.0}
    assert abs(added.mean().item() - 1) < 4 / 8000**0.5  # four standard deviations of 8,000 fair coins
    for wrong in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=f"block: dropout is {wrong}, expected at least 0 and below 1"):
            Stack(8, 1, dropout=wrong)


@pytest.mark.cells_by_loop
def test_blocks_that_run_again_change_no_number():
    """Not what one layer hands on to the others, nor running statistics, nor dropout; and fewer numbers are kept."""
    options = {"rwkv7": {"head_dim": 4}}
    model = LanguageModel(5, Stack(8, 3, ("rwkv7", "ligru"), layer_options=options, dropout=0.5))
    again, results = copy.deepcopy(model), []
    again.stack.recompute = True
    for each in (model, again):
        kept: list[int] = []
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t.numel()), t)[1], lambda t: t):
            y, _ = each(torch.tensor([[1, 2, 3, 4, 0, 1]]))
        y.square().sum().backward()
        results.append(({n: p.grad for n, p in each.named_parameters()}, dict(each.named_buffers()), sum(kept)))
    torch.testing.assert_close(results[1][:2], results[0][:2], rtol=0, atol=0)
    assert results[1][2] < results[0][2] / 2


class _Ones(Layer):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x, state=None, *, cu_seqlens=None):
        return torch.ones_like(x), ()


@pytest.mark.parametrize("model", [SAVED[0], SAVED[2]], ids=["language model", "classifier"])
@pytest.mark.parametrize("token", [-1, 300])
def test_a_token_out_of_range_is_named(model, token):
    who = "language model" if isinstance(model, LanguageModel) else "classifier"
    with pytest.raises(ShapeError, match=f"^{who}: token {token} is out of range, expected 0 to "):
        model(torch.tensor([[1, token]]))


@pytest.mark.parametrize("name", layers.names(presets=False))
def test_every_layer_fits_each_model(name):
    """Of features, some of them missing: a classifier, a labeler and a regressor read with it.

    Language models and forecasters run every causal layer elsewhere, and the laws of layers have the gradients.
    """
    options = {"layer_options": dict(layers.get(name).sample), "channel_mixer": "none"}
    torch.manual_seed(0)
    x = torch.randn(2, 5, 2).double()
    x[0, 1, 1] = torch.nan
    for kind, shape in ((SequenceClassifier, (2, 3)), (SequenceLabeler, (2, 5, 3)), (SequenceRegressor, (2, 3, 1))):
        outputs, _ = kind(3, Stack(DIM, 1, name, **options), Features(2, missing=True)).double()(x)
        assert outputs.shape == shape
        assert outputs.isfinite().all()
        assert not torch.equal(outputs[0], outputs[1])


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in layers.names() if "max_length" in options_of(layers.get(name))])
def test_a_stack_knows_the_longest_sequence_that_it_reads(name):
    stack = Stack(DIM, 1, layers.build(name, DIM, **layers.get(name).sample))
    for steps in (80, 81):  # what the samples have as `max_length`
        if steps <= (stack.longest or steps):
            stack(torch.randn(1, steps, DIM))
        else:
            with pytest.raises(ShapeError, match=f"{steps}, expected at most max_length|{steps} steps, expected"):
                stack(torch.randn(1, steps, DIM))

"""EncoderDecoder with any encoder: by steps, padded, by a search over all sequences; Memformer's slots, and the ARN."""

import itertools
import math

import pytest
import torch
from torch import nn

from by_hand import shaken, silu
from scanl import models
from scanl.errors import ConfigError, ShapeError
from scanl.layers import state as states
from scanl.layers.parts.rotary import rotate
from scanl.models import (
    AttentiveRecurrence,
    Cascade,
    Columns,
    EncoderDecoder,
    Features,
    LanguageModel,
    Stack,
    Tokens,
    TransformerEncoder,
)
from scanl.models.transformer_encoder import SlotWriter
from scanl.models.whole.cross_attention import CrossAttention, seen, side_by_side
from tests.layers.attention.test_rmt import rms_norm
from tests.test_layers import assert_same

COVERS = [
    "models/whole/attentive_recurrence",
    "models/columns",
    "models/whole/cross_attention",
    "models/transformer_encoder",
]

V = 5
pytestmark = pytest.mark.usefixtures("double")


def recurrent():
    return Stack(8, 1, "bidirectional", layer_options={"layer": "lstm"}, channel_mixer="none")


def decoder(layer="hgrn", depth=2):
    return Stack(8, depth, layer, channel_mixer="none")


MODELS = {
    "recurrent": lambda: EncoderDecoder(V, recurrent(), decoder(), Tokens(7), num_heads=2),
    "best of both": lambda: EncoderDecoder(
        V,
        Columns([TransformerEncoder(8, 1, num_heads=2), recurrent()]),
        decoder("layernorm_lstm"),
        Tokens(7),
        num_heads=2,
        attention="first",
    ),
    "arn": lambda: EncoderDecoder(
        V,
        TransformerEncoder(8, 1, num_heads=2),
        decoder(),
        Features(3),
        num_heads=4,
        recurrence=AttentiveRecurrence(8, 3, num_heads=2),
    ),
    "arn by a gate": lambda: EncoderDecoder(
        V,
        Cascade([recurrent(), TransformerEncoder(8, 1, num_heads=2)]),
        decoder(),
        Tokens(7),
        num_heads=4,
        recurrence=AttentiveRecurrence(8, 3, num_heads=2, fusion="gate"),
    ),
    "memformer": lambda: EncoderDecoder(
        V, TransformerEncoder(8, 2, num_heads=2, num_slots=3), decoder("lstm", 1), Tokens(7), num_heads=1
    ),
}


def sources(model, rows, steps):
    if isinstance(model.inputs, Tokens):
        return torch.randint(model.inputs.vocab_size, (rows, steps))
    return torch.randn(rows, steps, model.inputs.channels)


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_the_whole_and_padding_changes_nothing(name, tmp_path):
    model = shaken(MODELS[name]())
    source, target = sources(model, 2, 6), torch.randint(V, (2, 5))
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    assert model.places == {"best of both": [0], "arn": [0, 1, 1], "arn by a gate": [0, 1, 1], "memformer": [0]}.get(
        name, [0, 1]
    )
    whole, after = model(source, target, mask=mask)
    alone, last = model(source[1:, :4], target[1:])
    torch.testing.assert_close(whole[1:], alone)
    reading, state = model.encode(source, mask=mask)
    past, steps = None, []
    for token in target.split(1, 1):
        logits, past = model.decode(token, reading, past)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    if name == "memformer":
        torch.testing.assert_close(after[1:], last)
        assert not torch.equal(model(source, target, state)[0], whole)  # the next segment has read the slots
    whole.square().sum().backward()
    # What a Memformer writes is read by the next segment.
    unread = {key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert {key for key in unread if not key.startswith("stack.write.")} == set()
    model.zero_grad()
    model(source, target, state)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    model.save(tmp_path)
    torch.testing.assert_close(EncoderDecoder.load(tmp_path).double()(source, target)[0], model(source, target)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_source_equals_itself_alone_and_one_of_no_steps_reads_nothing(name, side):
    model, rows = shaken(MODELS[name]()), torch.tensor([6, 4, 0])[:, None]
    source, target, steps = sources(model, 3, 6), torch.randint(V, (3, 5)), torch.arange(6)
    mask = steps < rows if side == "right" else steps >= 6 - rows
    before = states.detach(model(source, target)[1])
    logits, after = model(source, target, before, mask=mask)
    tokens, _ = model.generate(source, before, max_new_tokens=3, beams=2, mask=mask)
    for i in range(3):
        own, row = source[i : i + 1, mask[i]], slice(i, i + 1)
        alone, last = model(own, target[row], states.index(before, row))
        torch.testing.assert_close(logits[row], alone)
        assert_same(states.index(after, row), last)
        found = model.generate(own, states.index(before, row), max_new_tokens=3, beams=2)[0]
        assert torch.equal(tokens[row, : found.shape[1]], found)
    assert_same(last, states.index(before, row), rtol=0, atol=0)
    changed = [attention(torch.ones(1, 2, 8), *(operand[2:] for operand in operands)) for attention, *operands in zip(
        model.attentions, *model.encode(source, mask=mask)[0], strict=True)]  # fmt: skip
    assert name.startswith("arn") or not any(each.any() for each in changed)
    grads = torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("name", MODELS)
def test_no_rows_have_no_tokens(name):
    model = MODELS[name]()
    tokens, state = model.generate(sources(model, 0, 4), max_new_tokens=3, beams=2)
    assert tokens.shape == (0, 1)
    assert model(sources(model, 0, 4), tokens, state)[0].shape == (0, 1, V)


def test_a_token_of_the_decoder_sees_all_of_the_source_and_none_of_the_target_to_come():
    model = shaken(MODELS["recurrent"]())
    source, target = sources(model, 1, 4), torch.randint(V, (1, 4))
    logits, other = (
        model(source, torch.cat([target[:, :3], last], 1))[0] for last in (target[:, 3:], 1 - target[:, 3:] % 2)
    )
    torch.testing.assert_close(logits[:, :3], other[:, :3])
    changed = source.clone()
    changed[0, 3] = (source[0, 3] + 1) % 7
    assert (model(changed, target)[0] != logits)[0].any(1).all()


@torch.no_grad()
def test_a_search_with_all_hypotheses_finds_the_likeliest_sequence_and_one_with_one_is_greedy():
    """Sequences of up to three tokens, of which 0 ends one."""
    model = EncoderDecoder(4, recurrent(), decoder("hgrn", 1), Tokens(7), num_heads=2)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter))
    model.embedding.weight.mul_(0.1)  # so that earlier tokens count beside the last
    model.attentions[0].o_proj.weight.mul_(0.2)
    source, mask = sources(model, 16, 5), torch.arange(5) < torch.arange(1, 17)[:, None]

    def ended(tokens):
        return [*tokens[: tokens.index(0)], 0] if 0 in tokens else list(tokens)

    def logits(row, tokens):
        return model(source[row : row + 1], torch.tensor([[1, *tokens[:-1]]]), mask=mask[row : row + 1])[0][0]

    def likelihood(row, tokens):
        return float(logits(row, tokens).log_softmax(-1)[range(len(tokens)), tokens].mean())

    every = {tuple(ended(each)) for each in itertools.product(range(4), repeat=3)}
    greedy, best = (model.generate(source, max_new_tokens=3, begin=1, beams=n, mask=mask)[0] for n in (1, 4**3))
    for row in range(16):
        assert logits(row, ended(greedy[row].tolist())).argmax(-1).tolist() == ended(greedy[row].tolist())
        assert tuple(ended(best[row].tolist())) == max(every, key=lambda each: likelihood(row, list(each)))


@torch.no_grad()
def test_beams_are_those_of_a_plain_search():
    """Each hypothesis is a list with its log-likelihood; ended ones wait, and the best has the greatest mean."""
    model = EncoderDecoder(4, recurrent(), decoder("hgrn", 1), Tokens(7), num_heads=2)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter))
    model.embedding.weight.mul_(0.3)
    source = sources(model, 16, 5)

    def continued(row, tokens):
        if 0 in tokens:
            return [0.0, *[-math.inf] * 3]
        logits = model(source[row : row + 1], torch.tensor([[1, *tokens]]))[0][0, -1]
        return logits.log_softmax(-1).tolist()

    def length(tokens):
        return tokens.index(0) + 1 if 0 in tokens else len(tokens)

    for beams in (2, 3):
        found, _ = model.generate(source, max_new_tokens=5, begin=1, beams=beams)
        for row in range(16):
            held = [(0.0, [])]
            for _ in range(5):
                longer = [(sum_ + gain, [*tokens, token]) for sum_, tokens in held
                          for token, gain in enumerate(continued(row, tokens))]  # fmt: skip
                held = sorted(longer, key=lambda pair: -pair[0])[:beams]
            best = max(held, key=lambda pair: pair[0] / length(pair[1]))[1]
            assert found[row].tolist()[: length(best)] == best[: length(best)]
            assert not any(found[row].tolist()[length(best) :])


def test_cross_attention_is_that_of_torch():
    ours, theirs = shaken(CrossAttention(8, 6, 2)), nn.MultiheadAttention(8, 2, False, kdim=6, vdim=6, batch_first=True)
    for name in ("q", "k", "v"):
        getattr(theirs, f"{name}_proj_weight").data = getattr(ours, f"{name}_proj").weight.data
    theirs.out_proj.weight.data = ours.o_proj.weight.data
    x, m = torch.randn(2, 3, 8), torch.randn(2, 5, 6)
    visible = torch.arange(5) < torch.tensor([[5], [2]])
    expected, _ = theirs(ours.norm(x), m, m, key_padding_mask=~visible)
    torch.testing.assert_close(ours(x, *ours.keys_values(m), visible[:, None]), expected)


def attention(q, ks, vs, scale):
    """Of one query (H, K)."""
    heads = []
    for head in range(len(q)):
        weights = (torch.stack([q[head] @ k[head] for k in ks]) * scale).exp()
        heads.append(sum(w * v[head] for w, v in zip(weights / weights.sum(), vs, strict=True)))
    return torch.stack(heads)


def test_a_memformer_reads_and_writes_as_its_equations_say():
    """Two segments, step by step and slot by slot."""
    encoder = shaken(TransformerEncoder(8, 2, num_heads=2, num_slots=3, tau=0.5))
    writer, K = encoder.write, 4
    slots = [v / v.norm() for v in writer.bias]
    state = None
    for segment in torch.randn(2, 5, 8):
        y, state = encoder(segment[None], state)
        hs = list(segment)
        for block, read in zip(encoder.blocks, encoder.reads, strict=True):
            normed = [rms_norm(block.norm, h) for h in hs]
            q, k, v = ([(p.weight @ h).view(2, K) for h in normed] for p in (block.q_proj, block.k_proj, block.v_proj))
            q, k = ([rotate(a[None, None], torch.tensor([[t]]), K, 1e4)[0, 0] for t, a in enumerate(b)] for b in (q, k))
            hs = [h + block.o_proj.weight @ attention(a, k, v, K**-0.5).flatten() for h, a in zip(hs, q, strict=True)]
            k, v = ([(p.weight @ m).view(2, K) for m in slots] for p in (read.k_proj, read.v_proj))
            q = [(read.q_proj.weight @ rms_norm(read.norm, h)).view(2, K) for h in hs]
            hs = [h + read.o_proj.weight @ attention(a, k, v, K**-0.5).flatten() for h, a in zip(hs, q, strict=True)]
            fed = [rms_norm(block.mlp_norm, h) for h in hs]
            hs = [
                h + block.mlp.down.weight @ (silu(block.mlp.gate.weight @ f) * (block.mlp.up.weight @ f))
                for h, f in zip(hs, fed, strict=True)
            ]
        hs = [rms_norm(encoder.norm, h) for h in hs]
        torch.testing.assert_close(y[0], torch.stack(hs))
        k, v = ([(p.weight @ h).view(2, K) for h in hs] for p in (writer.k_proj, writer.v_proj))
        written = []
        for m, bias in zip(slots, writer.bias, strict=True):
            q, own = ((p.weight @ m).view(2, K) for p in (writer.q_proj, writer.k_proj))
            a = attention(q, [own, *k], [m.view(2, K), *v], K**-0.5 / 0.5).flatten() + bias
            written.append(a / a.norm())
        slots = written
        torch.testing.assert_close(state[0], torch.stack(slots))


def test_slots_keep_their_length_forget_and_do_not_mix():
    writer, y = SlotWriter(8, 3, 2, 0.25), torch.randn(1, 4, 8)
    slots = torch.nn.functional.normalize(torch.randn(1, 3, 8), dim=-1)
    after = writer(slots, y, None)
    torch.testing.assert_close(after.norm(dim=-1), torch.ones(1, 3))
    other = writer(slots.clone().index_fill_(1, torch.tensor([0]), 0.25), y, None)
    torch.testing.assert_close(other[:, 1:], after[:, 1:])
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    for _ in range(60):
        slots = writer(slots, y, nothing)
    torch.testing.assert_close(slots[0], writer.start(), rtol=0, atol=0.05)


def test_the_first_read_of_the_attentive_recurrence_is_a_mean():
    """Without a query it reads the mean at every step, so it is its layer on a constant input."""
    arn, u = shaken(AttentiveRecurrence(8, 4, num_heads=2)), torch.randn(2, 5, 8)
    visible = (torch.arange(5) < torch.tensor([[5], [3]]))[:, None]
    attention = arn.attention
    _, v = attention.keys_values(u)
    mean = torch.stack([v[0].mean(0), v[1, :3].mean(0)]).flatten(1) @ attention.o_proj.weight.T
    first = arn.layer(mean[:, None])[0]
    torch.testing.assert_close(arn(u, visible)[:, :1], first)
    assert not torch.allclose(arn(u, visible)[:, 1:], arn.layer(mean[:, None].expand(-1, 4, -1))[0][:, 1:])
    attention.q_proj.weight.data.zero_()
    torch.testing.assert_close(arn(u, visible), arn.layer(mean[:, None].expand(-1, 4, -1))[0])


def test_a_gate_weighs_what_is_read_of_the_encoder_and_of_the_recurrence():
    """The decoder once more, block by block, with torch's attention; the lower block reads the encoder alone."""
    model = shaken(MODELS["arn by a gate"]())
    source, target = sources(model, 1, 5), torch.randint(V, (1, 4))
    embedded = model.input(source)
    lstm, transformer = model.stack.columns
    encoded = transformer(lstm(embedded)[0])[0]
    steps = model.recurrence(embedded, torch.ones(1, 1, 5, dtype=torch.bool))
    of_encoder, of_encoder_above, of_steps = model.attentions

    def read(attention, x, memory):
        rows = (attention.norm(x), attention.q_proj), (memory, attention.k_proj), (memory, attention.v_proj)
        q, k, v = ((row @ proj.weight.T).unflatten(-1, (4, 2)).transpose(1, 2) for row, proj in rows)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return o.transpose(1, 2).flatten(2) @ attention.o_proj.weight.T

    x = model.embedding(target)
    x = model.decoder.blocks[0](x)[0]
    x = x + read(of_encoder, x, encoded)
    x = model.decoder.blocks[1](x)[0]
    c, r = read(of_encoder_above, x, encoded), read(of_steps, x, steps)
    W, b = model.fusion_gate.weight, model.fusion_gate.bias
    share = 1 / (1 + torch.exp(-(c @ W[:, :8].T + r @ W[:, 8:].T + b)))
    expected = model.head(model.decoder.norm(x + share * c + (1 - share) * r))
    torch.testing.assert_close(model(source, target)[0], expected)


def test_columns_are_their_stacks_side_by_side():
    columns = [Stack(8, 1, "s5", channel_mixer="none"), Stack(8, 2, "s5", channel_mixer="none")]
    both = shaken(Columns(columns))
    assert both.timed
    assert not both.bidirectional
    x, spans, state = torch.randn(2, 6, 8), torch.rand(2, 6) + 0.5, None
    ys = torch.cat([column(x, timespans=spans)[0] for column in columns], -1)
    for at in (slice(0, 4), slice(4, 6)):
        y, state = both(x[:, at], state, timespans=spans[:, at])
        torch.testing.assert_close(y, ys[:, at] @ both.out_proj.weight.T + both.out_proj.bias)
    other = Columns([decoder(), recurrent()])
    assert not other.timed
    assert not Columns([columns[0], decoder()]).timed
    assert other.bidirectional
    assert [type(mixer).__name__ for mixer in other.mixers()] == ["HGRN", "HGRN", "Bidirectional"]


def test_packed_sequences_stand_side_by_side():
    rows, mask = side_by_side(torch.arange(1.0, 6).view(1, 5, 1), torch.tensor([0, 2, 2, 5]))
    assert rows[..., 0].tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    assert mask.sum(1).tolist() == [2, 0, 3]
    assert seen(mask, rows).int().tolist() == [[[1, 1, 0]], [[1, 1, 1]], [[1, 1, 1]]]  # never nothing
    encoder = shaken(TransformerEncoder(8, 1, num_heads=2, num_slots=2))
    x = torch.randn(1, 5, 8, requires_grad=True)
    y, slots = encoder(x, cu_seqlens=torch.tensor([0, 2, 2, 5]))
    torch.testing.assert_close(y[:, 2:], encoder(x[:, 2:])[0])
    assert math.isfinite(torch.autograd.grad(y.sum() + slots.sum(), x)[0].sum())
    assert encoder(x[:, :0])[0].shape == (1, 0, 8)


def test_what_does_not_fit_is_refused():
    small = TransformerEncoder(8, 1, num_heads=2)
    for make, message in (
        (lambda: LanguageModel(5, small), "language model: a TransformerEncoder is bidirectional, expected a causal"),
        (lambda: TransformerEncoder(6, 1, num_heads=2), "num_heads is 2, expected dim / num_heads to be even"),
        (lambda: Columns([]), r"columns is \[\], expected a list of at least one stack"),
        (lambda: Cascade([small, 3]), r"columns is \['TransformerEncoder', 'int'\], expected"),
        (
            lambda: EncoderDecoder(
                5, small, decoder(), Tokens(5), attention="first", recurrence=AttentiveRecurrence(8, fusion="gate")
            ),
            'fusion is "gate", expected "stack" because the last block does not attend to the encoder',
        ),
        (
            lambda: AttentiveRecurrence(8, layer="linear_attention", layer_options={"causal": False, "num_heads": 2}),
            "layer is 'linear_attention', expected a causal layer",
        ),
        (lambda: Columns([small, decoder(), Stack(4, 1)]), r"widths \[8, 8, 4\], expected one width"),
        (lambda: AttentiveRecurrence(8, layer="bidirectional"), "layer is 'bidirectional', expected a causal layer"),
        (lambda: EncoderDecoder(5, small, recurrent(), Tokens(5)), "layer 'bidirectional' is bidirectional"),
        (
            lambda: EncoderDecoder(5, small, decoder(), Tokens(5), num_heads=3),
            "num_heads is 3, expected a divisor of 8",
        ),
        (
            lambda: EncoderDecoder(5, small, models.MegalodonStack(8, 1, layer_options={"z_dim": 4}), Tokens(5)),
            "decoder is a MegalodonStack, expected a Stack",
        ),
        (
            lambda: EncoderDecoder(5, small, decoder(), Tokens(5), recurrence=AttentiveRecurrence(16)),
            "recurrence has dim=16, expected 8 of the encoder",
        ),
        (lambda: small(torch.randn(1, 2, 8), timespans=torch.ones(1, 2)), "timespans is given, expected none"),
        (
            lambda: MODELS["recurrent"]().generate(torch.ones(1, 2).long(), max_new_tokens=1, beams=0),
            "beams is 0, expected at least 1",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    with pytest.raises(ShapeError, match="target has 2 rows, expected 1 of the sources"):
        MODELS["recurrent"]()(torch.ones(1, 3).long(), torch.ones(2, 3).long())

"""Models of DNA and of images: HyenaDNA with its tokens, prompts and warm-up; Caduceus; Vim."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from scanl.data.text.corpus import Corpus
from scanl.data.text.text import TokenText
from scanl.errors import ConfigError, ShapeError
from scanl.layers import build
from scanl.layers.channel.mlp import MLP
from scanl.models import (
    ImageClassifier,
    LanguageModel,
    Patches,
    SoftPrompt,
    Stack,
    StrandModel,
    caduceus,
    hyena_dna,
    vim,
)
from scanl.models.saving import recorded
from scanl.models.whole.dna import complement, decode, encode

COVERS = ["models/adapting/soft_prompt", "models/whole/vim"]

OPTIONS = {"state_dim": 2, "rank": 2}


def strand(text="ACGTNAACGTTGCA"):
    return encode(text)[None]


def test_init_of_hyena_dna():
    """The numbers of the paper's initialisation, in every linear map, the filters' too."""
    model = hyena_dna(64, 2, 30)
    for name, parameter in model.named_parameters():
        written = name.endswith(("out_proj.weight", "fc2.weight"))
        if name.endswith(".weight") and parameter.ndim == 2 and parameter.numel() > 2000:
            std = 0.02 / (math.sqrt(4) if written else 1)
            assert abs(parameter.std().item() / std - 1) < 0.1, name
    mixer = model.stack.blocks[0].mixer
    assert mixer.max_length == 32
    assert mixer.filter_fn.implicit_filter["1"].freq.unique().tolist() == [10.0]
    assert not mixer.out_proj.bias.any()
    assert model.vocab_size == 16
    assert model.head is None


def test_hyena_dna_is_the_released_program(tmp_path):
    """`standalone_hyenadna.py` ran once in float64, with sines for weights: its logits of bases at the last place."""
    found = json.loads((Path(__file__).parents[2] / "outside" / "models.json").read_text())["hyena_dna"]
    model = hyena_dna(4, 2, 10).double().eval()
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
            wave = torch.sin(1.3 * torch.arange(parameter.numel()).double() + index) / 2
            parameter.copy_(wave.view(parameter.shape))
        logits, _ = model((torch.arange(20).view(2, 10) * 7 % 5) + 7)
    torch.testing.assert_close(logits[1, -1, 7:12], torch.tensor(found, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    model.float().save(tmp_path)
    assert recorded(LanguageModel.load(tmp_path)) == recorded(model)


def test_tokens_of_dna():
    assert encode("ACGTN").tolist() == [7, 8, 9, 10, 11]
    assert decode(torch.arange(16)) == "[CLS][SEP][BOS][MASK][PAD][RESERVED][UNK]ACGTN"
    assert torch.equal(complement(complement(torch.arange(16))), torch.arange(16))
    assert encode("").shape == (0,)


def test_a_soft_prompt_is_what_a_model_reads_first():
    model = LanguageModel(16, Stack(8, 1, "lru"), embedding_norm=True, embedding_scale=2.0)
    prompt, tokens = SoftPrompt(model, 3), torch.randint(16, (2, 5))
    with torch.no_grad():
        prompt.vectors.copy_(model.embedding.weight[[4, 9, 1]])
    whole, _ = model(torch.cat([torch.tensor([[4, 9, 1]] * 2), tokens], 1))
    logits, _ = model(tokens, prompt(model, 2))
    torch.testing.assert_close(logits, whole[:, 3:])
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert prompt.vectors.grad.any(1).all()
    with pytest.raises(ConfigError, match="soft prompt: count is 0, expected at least 1"):
        SoftPrompt(model, 0)


class Counted(TokenText):
    """A text whose tokens are their own places."""

    exam = None
    corpus = Corpus(np.arange(200, dtype=np.uint8), np.arange(200, dtype=np.uint8))


def test_the_length_of_sequences_doubles_while_a_run_warms_up():
    source = Counted(sequence_length=16, length_doublings=2, doubling_steps=3)
    source.check()
    plain = Counted(sequence_length=16)
    for step, shape in ((0, (8, 4)), (2, (8, 4)), (3, (4, 8)), (6, (2, 16)), (99, (2, 16))):
        inputs, targets, *_ = source.batch(step, 2)
        assert inputs.shape == targets.shape == shape
        assert (targets == (inputs + 1) % 200).all()
        assert (inputs.ravel() == plain.batch(step, 2).inputs.ravel()).all()
    for options, message in (
        ({"length_doublings": -1}, "length_doublings is -1, expected at least 0"),
        ({"doubling_steps": 0}, "doubling_steps is 0, expected at least 1"),
        ({"length_doublings": 5}, r"sequence_length is 16, expected a multiple of 2\^5 because of length_doublings"),
        ({"length_doublings": 1, "carry_state": True}, "carry_state is True, expected False because of"),
    ):
        with pytest.raises(ConfigError, match=message):
            Counted(sequence_length=16, **options).check()


def test_caduceus_of_both_strands_does_not_care_which_is_read():
    model, tokens = caduceus(8, 2, layer_options=OPTIONS).double(), strand()
    turned = complement(tokens.flip(1))
    logits = model(tokens)
    torch.testing.assert_close(model(turned), logits.flip(1)[..., complement(torch.arange(16))])
    torch.testing.assert_close(model.features(turned), model.features(tokens))
    alone = caduceus(8, 2, both_strands=False, layer_options=OPTIONS).double()
    alone.load_state_dict(model.state_dict())
    assert (alone(turned) - alone(tokens).flip(1)[..., complement(torch.arange(16))]).abs().max() > 1e-3
    both = alone(tokens) + alone(turned).flip(1)[..., complement(torch.arange(16))]
    torch.testing.assert_close(logits, both)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("swap", [False, True])
def test_caduceus_is_the_model_of_two_strands_side_by_side(swap, depth):
    """Blocks of 2 D channels: the norm and the mixer act on each half in its own direction, as `reverse_complement`."""
    model, tokens = caduceus(8, depth, layer_options=OPTIONS, swap_strands=swap).double(), strand()
    table = model.embedding.weight
    x = torch.cat([table[tokens], table[complement(tokens)].flip(-1)], -1)

    def halves(norm, x):
        one, other = x.chunk(2, -1)
        return torch.cat([norm(one), norm(other.flip(1, 2)).flip(1, 2)], -1)

    for block in model.stack.blocks:
        pair = build("reverse_complement", 16, layer_options=OPTIONS).double()
        pair.layer.load_state_dict(block.mixer.state_dict())
        if swap:  # first half of the norm: of the second half of x; of the residual too
            x = torch.cat([x[..., 8:], x[..., :8]], -1)
        x = x + pair(halves(block.mixer_norm, x))[0]
    one, other = halves(model.stack.norm, x).chunk(2, -1)
    expected = one @ table.T + other.flip(-1) @ table[complement(torch.arange(16))].T
    torch.testing.assert_close(model(tokens), expected)
    turned = model(complement(tokens.flip(1)))
    torch.testing.assert_close(turned, expected.flip(1)[..., complement(torch.arange(16))])
    mask = torch.ones(2, tokens.shape[1] + 3, dtype=torch.bool)
    mask[0, :3] = mask[1, -3:] = False
    padded = tokens.new_zeros(mask.shape)
    padded[mask] = torch.cat([tokens[0], tokens[0]])
    found = model(padded, mask=mask)[mask].view(2, *expected.shape[1:])
    torch.testing.assert_close(found, expected[:1].expand_as(found))


def test_caduceus_swaps_no_single_strand():
    with pytest.raises(
        ConfigError, match="strand model: swap_strands is True, expected False because of both_strands=Fa"
    ):
        caduceus(8, 1, both_strands=False, swap_strands=True)


def test_caduceus_reads_a_padded_batch_as_each_row_alone(tmp_path):
    model = caduceus(8, 1, layer_options=OPTIONS).double()
    tokens = torch.cat([strand(), strand().flip(1)])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, :6] = False
    logits = model(tokens, mask=mask)
    torch.testing.assert_close(logits[0], model(tokens[:1])[0])
    torch.testing.assert_close(logits[1, 6:], model(tokens[1:, 6:])[0])
    assert not logits[1, :6].any()
    torch.testing.assert_close(model.features(tokens, mask=mask)[1], model.features(tokens[1:, 6:])[0])
    model.float().save(tmp_path)
    torch.testing.assert_close(StrandModel.load(tmp_path)(tokens), model(tokens))
    with pytest.raises(ShapeError, match=r"strand model: tokens is torch.float32 \(1, 2\), expected integers \(B, T\)"):
        model(torch.zeros(1, 2))
    with pytest.raises(ConfigError, match="strand model: vocab_size is 11, expected at least 12"):
        caduceus(8, 1, vocab_size=11)


def test_vim_reads_patches_with_the_class_in_the_middle(tmp_path):
    model, images = vim(5, Patches((6, 4), 3, 2), 8, 2, OPTIONS).double(), torch.randn(2, 3, 6, 4, dtype=torch.float64)
    weight, bias = model.patches.weight.flatten(1), model.patches.bias
    patches = [images[:, :, i : i + 2, j : j + 2].flatten(1) @ weight.T + bias for i in (0, 2, 4) for j in (0, 2)]
    x = torch.stack([*patches[:3], model.token[0].expand(2, -1), *patches[3:]], 1) + model.positions
    torch.testing.assert_close(model(images), model.head(model.stack(x)[0][:, 3]))
    model(images).square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    model.float().save(tmp_path)
    torch.testing.assert_close(ImageClassifier.load(tmp_path)(images.float()), model.float()(images.float()))
    with pytest.raises(ShapeError, match=r"image classifier: images has shape \(2, 3, 4, 6\), expected \(B, 3, 6, 4\)"):
        model(images.mT.float())
    with pytest.raises(ConfigError, match=r"Patches: image is \(6, 5\), expected two multiples of size=2"):
        Patches((6, 5), size=2)


def test_the_mlp_by_hand():
    layer = MLP(2, 1.5, "silu").double()
    x = torch.tensor([[[1.0, -2.0]]], dtype=torch.float64)
    hidden = layer.fc1.weight @ x[0, 0] + layer.fc1.bias
    assert hidden.shape == (3,)
    expected = layer.fc2.weight @ (hidden * hidden.sigmoid()) + layer.fc2.bias
    torch.testing.assert_close(layer(x)[0][0, 0], expected)
    for options, message in (
        ({"activation": "gelu"}, "mlp: unknown activation 'gelu'"),
        ({"expand": 0}, "mlp: expand is 0, expected more than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            MLP(2, **options)


def test_init_of_vim():
    """Its authors': LeCun's normal numbers for the patches, cut at two deviations; 0.02 for the head; biases 0."""
    model = vim(500, Patches((32, 32), 3, 8), 256, 1)
    weight = model.patches.weight
    assert weight.std().item() == pytest.approx((3 * 8**2) ** -0.5, rel=0.02)
    assert weight.abs().max().item() <= 2 / 0.8796 * (3 * 8**2) ** -0.5
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert not model.patches.bias.any()
    assert not model.head.bias.any()

"""Laws of `scanl.hub.accelerate`, over every class of mixers that the installed transformers has."""

import copy
import inspect

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'scanl[hub]'")

from hub_models import CASES, VOCAB
from scanl import hub
from scanl.errors import ConfigError, ShapeError
from scanl.hub import mixers

STEPS = 13
each_model = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def built():
    """Each model once, as it came."""
    return {}


@pytest.fixture
def model(name, built):
    if name not in built:
        built[name] = CASES[name].build()
    model = built[name].eval()
    yield model
    hub.restore(model)


def tokens(batch=2, steps=STEPS):
    return torch.randint(1, VOCAB, (batch, steps), generator=torch.Generator().manual_seed(1))


def padding(batch=2, steps=STEPS, left=True):
    mask = torch.ones(batch, steps, dtype=torch.long)
    if left:
        mask[0, :5] = 0
    else:
        mask[0, -5:] = 0
    return mask


def close(found, wanted):
    """To what float32 holds: 1e-5 of the largest value."""
    assert found.shape == wanted.shape
    assert wanted.isfinite().all()
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def cache_name(model):
    """How this model calls its cache; RWKV says state."""
    names = inspect.signature(type(model).forward).parameters
    return next(name for name in ("cache_params", "past_key_values", "state") if name in names)


def in_pieces(model, ids, cuts, mask=None):
    name, cache, logits = cache_name(model), None, []
    for begin, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        given = {} if mask is None else {"attention_mask": mask[:, :end]}
        out = model(ids[:, begin:end], **{name: cache}, use_cache=True, **given)
        cache = getattr(out, name)
        logits.append(out.logits)
    return torch.cat(logits, 1)


@each_model
@torch.no_grad()
def test_prefill(name, model):
    wanted = model(tokens()).logits
    report = hub.accelerate(model)
    assert report.accelerated
    assert all(row.now for row in report)
    close(model(tokens()).logits, wanted)
    hub.restore(model)
    assert torch.equal(model(tokens()).logits, wanted)


@each_model
@pytest.mark.parametrize("cuts", [[7], [1, 2, 6], [5, 6, 7, 11], list(range(1, STEPS))], ids=str)
@torch.no_grad()
def test_pieces(name, model, cuts):
    """A prompt fed in pieces of any length, tokens among them, is the prompt fed at once."""
    whole = model(tokens()).logits
    hub.accelerate(model)
    close(in_pieces(model, tokens(), cuts), whole)


@each_model
@torch.no_grad()
def test_pieces_with_left_padding(name, model):
    mask = padding()
    hub.accelerate(model)
    alone = model(tokens()[:1, 5:]).logits
    for cuts in ([7], [3, 9], list(range(6, STEPS))):
        found = in_pieces(model, tokens(), cuts, mask)
        close(found[:1, 5:], alone)
        close(found[1:], model(tokens()[1:]).logits)


@each_model
@torch.no_grad()
def test_left_padding(name, model):
    mask = padding()
    original = model(tokens(), attention_mask=mask).logits
    alone = model(tokens()[:1, 5:]).logits
    hub.accelerate(model)
    found = model(tokens(), attention_mask=mask).logits
    close(found[:1, 5:], alone)
    if "padding" not in CASES[name].wrong:
        close(found[mask.bool()], original[mask.bool()])


@each_model
@torch.no_grad()
def test_right_padding(name, model):
    hub.accelerate(model)
    mask = padding(left=False)
    found = model(tokens(), attention_mask=mask).logits
    close(found[:1, :-5], model(tokens()[:1, :-5]).logits)
    close(found[1:], model(tokens()[1:]).logits)


@each_model
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_generate(name, model, beams):
    """The same tokens as before; where the original errs, each sequence's own."""
    options = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    wrong = CASES[name].wrong
    mask = torch.ones_like(tokens()) if "padding" in wrong else padding()
    if not wrong & {"batch", "cache"}:
        wanted = model.generate(tokens(), attention_mask=mask, **options)
        hub.accelerate(model)
        assert torch.equal(model.generate(tokens(), attention_mask=mask, **options), wanted)
    hub.accelerate(model)
    mask = padding()
    both = model.generate(tokens(), attention_mask=mask, **options)
    for row, begin in ((0, 5), (1, 0)):
        alone = model.generate(tokens()[row : row + 1, begin:], **options)[0, STEPS - begin :]
        assert torch.equal(both[row, STEPS : STEPS + len(alone)], alone)


@each_model
def test_gradients(name, model):
    """Every gradient of a training step."""
    model.train()

    def gradients():
        model.zero_grad()
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    torch.manual_seed(3)
    wanted = gradients()
    hub.accelerate(model)
    torch.manual_seed(3)
    found = gradients()
    assert found.keys() == wanted.keys()
    scale = max(g.abs().max() for g in wanted.values())
    for parameter, gradient in wanted.items():
        error = (found[parameter] - gradient).abs().max()
        # A gradient that cancels to little is known to the rounding of what it was summed from.
        assert error <= 1e-5 * gradient.abs().max() + 1e-7 * scale, parameter


@each_model
@torch.no_grad()
def test_packing(name, model):
    """Packed sequences are kept apart by the mixers; attention does that by itself, where it can."""
    if not all("packed sequences are kept apart" in row.note for row in hub.accelerate(model)):
        pytest.fail(f"{name}: the report does not say that packed sequences are kept apart")
    if any("attention" in type(m).__name__.lower() for m in model.modules() if not _is_mixer(m)):
        pytest.skip("attention among the layers: torch's own does not keep packed sequences apart")
    ids = tokens(1)
    wanted = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:5]).logits, model(ids[:, 5:]).logits], 1)
    close(model(ids, cu_seq_lens_q=torch.tensor([0, 4, 5, STEPS]), use_cache=False).logits, wanted)
    index = torch.tensor([[0] * 4 + [1] + [2] * 8])
    close(model(ids, seq_idx=index, use_cache=False).logits, wanted)


def _is_mixer(module):
    return "_scanl_before" in module.__dict__


@each_model
@torch.no_grad()
def test_copies_are_their_own(name, model):
    wanted = model(tokens()).logits
    hub.accelerate(model)
    twin = copy.deepcopy(model)
    close(twin(tokens()).logits, wanted)
    hub.restore(twin)
    assert torch.equal(twin(tokens()).logits, wanted)
    assert len(hub.accelerate(model).accelerated) == len(hub.accelerate(twin).accelerated)


def test_nothing_but_the_object_is_changed():
    first, second = CASES["mamba"].build(), CASES["mamba"].build()
    before = type(first.backbone.layers[0].mixer).forward
    hub.accelerate(first)
    assert type(first.backbone.layers[0].mixer).forward is before
    assert "forward" not in second.backbone.layers[0].mixer.__dict__
    assert first.state_dict().keys() == second.state_dict().keys()


def test_what_is_left_alone_has_a_reason():
    model = CASES["mamba"].build()
    mixer = model.backbone.layers[0].mixer
    mixer.forward = lambda *args, **kwargs: None
    report = hub.accelerate(model)
    assert [bool(row.now) for row in report] == [False, True]
    assert "its forward was replaced by another library" in str(report)
    hub.restore(model)
    assert "forward" in mixer.__dict__
    assert "no recurrent mixer" in str(hub.accelerate(torch.nn.Linear(2, 2)))


def test_errors():
    with pytest.raises(ConfigError, match="accelerate: model is a str, expected a torch.nn.Module"):
        hub.accelerate("mamba")
    model = CASES["mamba"].build()
    hub.accelerate(model)
    ids, offsets = tokens(1), torch.tensor([0, 4, STEPS])
    with pytest.raises(ShapeError, match="cu_seq_lens_q is given for input_ids of batch 2, expected a batch of 1"):
        model(tokens(2), cu_seq_lens_q=offsets)
    with pytest.raises(ShapeError, match=r"seq_idx has shape \(1, 3\), expected \(1, 13\) of input_ids"):
        model(ids, seq_idx=torch.zeros(1, 3))
    with pytest.raises(ConfigError, match="attention_mask marks padding beside packed sequences"):
        model(ids, cu_seq_lens_q=offsets, attention_mask=padding(1))
    cache = model(ids, use_cache=True).cache_params
    with pytest.raises(ConfigError, match="packed sequences start from nothing, but the cache holds a state"):
        model(ids, cu_seq_lens_q=offsets, cache_params=cache, use_cache=True)
    close(model(ids).logits, CASES["mamba"].build()(ids).logits)  # an error leaves nothing behind


def test_every_family_is_tried():
    """Every class that a family names is in a model of `hub_models.py`, and every model has a mixer."""
    found = set()
    for case in CASES.values():
        model = case.build()
        report = hub.accelerate(model)
        assert report.accelerated
        found |= {row.kind for row in report.accelerated}
    named = {path.split(".")[1] for name in mixers.names() for path in mixers.get(name).modules}
    assert named == found

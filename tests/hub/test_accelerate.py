"""Laws of `scanl.hub.accelerate`, over every class of transformers that a patch replaces."""

import copy
import inspect
import io
import itertools
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'scanl[hub]'")

from transformers import DynamicCache

from hub_models import CASES, VOCAB
from scanl import hub
from scanl.errors import ConfigError, ShapeError
from scanl.hub import patches

COVERS = ["hub/forwards", "hub/patches/*"]

STEPS = 13
each_model = pytest.mark.parametrize("name", CASES)
KINDS = [pytest.param(name, marks=[pytest.mark.long] * case.alike) for name, case in CASES.items()]
each_kind = pytest.mark.parametrize("name", KINDS)


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
    return next(name for name in ("cache", "cache_params", "past_key_values", "state") if name in names)


def first_cache(model):
    """What a prompt in pieces begins with: a cache only where the model does not return the one that it makes."""
    returned = hasattr(model(tokens(1, 1), use_cache=True), cache_name(model))
    return None if returned else DynamicCache(config=model.config)


def in_pieces(model, ids, cuts, mask=None):
    name, cache, logits = cache_name(model), first_cache(model), []
    places = "position_ids" in inspect.signature(type(model).forward).parameters
    for begin, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        given = {} if mask is None else {"attention_mask": mask[:, :end]}
        if places:  # Bamba starts from 0 again with every piece unless told
            given["position_ids"] = torch.arange(begin, end).expand(len(ids), -1)
        out = model(ids[:, begin:end], **{name: cache}, use_cache=True, **given)
        cache = getattr(out, name, cache)
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


def each_cut(short, long):
    """The cases of several ways to cut a prompt. What follows what in the long ones does so in the short ones, too."""
    cases = [pytest.param(short, id="short"), pytest.param(long, id="long", marks=pytest.mark.long)]
    return pytest.mark.parametrize("cuts", cases)


ALL_CUTS = list(range(1, STEPS))


@each_model
@each_cut(([7], [1, 2, 6, 7, 8, 11]), ([1, 2, 6], [5, 6, 7, 11], ALL_CUTS))
@torch.no_grad()
def test_pieces(name, model, cuts):
    """A prompt fed in pieces of any length, tokens among them, is the prompt fed at once."""
    whole = model(tokens()).logits
    hub.accelerate(model)
    for places in cuts:
        close(in_pieces(model, tokens(), places), whole)


@each_model
@each_cut(([7], [3, 4, 5, 6, 9]), ([5], [3, 9], ALL_CUTS))
@torch.no_grad()
def test_pieces_with_left_padding(name, model, cuts):
    mask = padding()
    if "masks" in CASES[name].wrong:  # and takes padding for a token where it comes alone
        model = _without_attention(CASES[name].build())
    hub.accelerate(model)
    alone, other = model(tokens()[:1, 5:]).logits, model(tokens()[1:]).logits
    for places in cuts:
        found = in_pieces(model, tokens(), places, mask)
        close(found[:1, 5:], alone)
        close(found[1:], other)


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


@each_kind
@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.long), 3])  # a beam is a greedy step, reordered
@torch.no_grad()
def test_generate(name, model, beams):
    """The same tokens as before; where the original errs, each sequence's own."""
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    wrong = CASES[name].wrong
    if "order" in wrong and beams > 1:  # the model's own cache refuses to be reordered
        options["use_cache"] = False
    both, mask = None, torch.ones_like(tokens()) if "padding" in wrong else padding()
    if not wrong & {"batch", "cache", "steps"}:
        cached = {"use_cache": False} if "generate" in wrong or ("beams" in wrong and beams > 1) else {}
        wanted = model.generate(tokens(), attention_mask=mask, **options, **cached)
        hub.accelerate(model)
        both = model.generate(tokens(), attention_mask=mask, **options)
        assert torch.equal(both, wanted)
    if both is None or "padding" in wrong:
        hub.accelerate(model)
        both = model.generate(tokens(), attention_mask=padding(), **options)
    for row, begin in ((0, 5), (1, 0)):
        alone = model.generate(tokens()[row : row + 1, begin:], **options)[0, STEPS - begin :]
        assert torch.equal(both[row, STEPS : STEPS + len(alone)], alone)


@each_kind
@torch.no_grad()
def test_static_cache(name, model):
    """`generate` then gives the model a dict of masks, and its modules caches that never grow."""
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": padding()}
    try:
        static = model.generate(tokens(), **options, cache_implementation="static")
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"the original cannot: {error}")
    hub.accelerate(model)
    wanted = static if "static" in CASES[name].wrong else model.generate(tokens(), **options)
    assert torch.equal(model.generate(tokens(), **options, cache_implementation="static"), wanted)


@each_kind
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_recorded_past(name, model, padded):
    """A cache that records its past, for assisted decoding, gives up its last tokens again."""
    cache = getattr(model(tokens()[:, :2], use_cache=True), cache_name(model), None)
    if not getattr(cache, "is_croppable", False):
        pytest.skip("its cache holds a state that cannot be undone")
    hub.accelerate(model)
    mask = padding() if padded else torch.ones_like(tokens())
    wanted = model(tokens(), attention_mask=mask).logits
    cache = type(cache)(config=model.config)
    cache.activate_past_recording()
    guesses, found = torch.full((2, 3), 7), []
    for begin, end in itertools.pairwise([0, 2, 3, 7, STEPS]):
        ids = torch.cat([tokens()[:, begin:end], guesses], 1)
        given = {"attention_mask": torch.cat([mask[:, :end], torch.ones_like(guesses)], 1), "use_cache": True}
        found.append(model(ids, **{cache_name(model): cache}, **given).logits[:, : end - begin])
        cache.crop(-3)
    close(torch.cat(found, 1)[mask.bool()], wanted[mask.bool()])


def gradients(model, run):
    """Of run(model), a loss, by every parameter."""
    torch.manual_seed(3)
    model.zero_grad()
    run(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def moved(model):
    """A copy whose every weight is off by a rounding, up or down."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data *= 1 + 2.0**-23 * (2 * torch.randint_like(parameter, 2) - 1)
    return twin


def close_gradients(found, wanted, rounded):
    """rounded: of the same with weights that are `moved`.

    A gradient that cancels to little is known to the rounding of what it was summed from, and none better than the
    rounding of the weights leaves it.
    """
    assert found.keys() == wanted.keys()
    scale = max(g.abs().max() for g in wanted.values())
    for name, gradient in wanted.items():
        assert found[name].shape == gradient.shape, name
        error, own = ((of[name] - gradient).abs().max() for of in (found, rounded))
        assert error <= 1e-5 * gradient.abs().max() + 1e-7 * scale + 2 * own, name


@each_model
def test_gradients(name, model):
    """Every gradient of a training step, of the inputs too: without a cache, with one, and as the model chooses."""
    model.train()

    def step(model, use_cache=False):
        inputs = []

        def keep(module, args, embedded):
            embedded.retain_grad()
            inputs.append(embedded)

        hook = model.get_input_embeddings().register_forward_hook(keep)
        found = gradients(model, lambda model: model(tokens(), labels=tokens(), use_cache=use_cache).loss)
        hook.remove()
        return found | {"inputs": inputs[0].grad}

    rounded, wanted = step(moved(model)), step(model)
    hub.accelerate(model)
    for use_cache in (False, True, None):
        close_gradients(step(model, use_cache), wanted, rounded)


@each_model
def test_gradients_of_pieces(name, model):
    """A padded batch fed in pieces, through its cache, has the gradients of its sequences fed whole and alone."""
    model.train()
    weights, begins = torch.randn(2, STEPS, VOCAB), (5, 0)
    mask = padding()
    if "masks" in CASES[name].wrong:
        mask, begins = None, (0, 0)

    def alone(model):
        rows = ((slice(row, row + 1), slice(begin, None)) for row, begin in enumerate(begins))
        return sum((model(tokens()[row], use_cache=False).logits * weights[row]).sum() for row in rows)

    def pieces(model):
        logits = in_pieces(model, tokens(), [7, 8], mask) * weights
        return (logits if mask is None else logits[mask.bool()]).sum()

    rounded, wanted = gradients(moved(model), alone), gradients(model, alone)
    hub.accelerate(model)
    close_gradients(gradients(model, pieces), wanted, rounded)


@each_model
@torch.no_grad()
def test_packing(name, model):
    """Patched modules keep packed sequences apart; a mask tells attention which tokens may see which."""
    if not all("packed sequences are kept apart" in row.note for row in hub.accelerate(model)):
        pytest.fail(f"{name}: the report does not say that packed sequences are kept apart")
    ids, index = tokens(1), torch.tensor([[0] * 4 + [1] + [2] * 8])
    given: dict = {"use_cache": False}
    if "masks" in CASES[name].wrong:
        model = _without_attention(CASES[name].build())
        hub.accelerate(model)
    elif any("attention" in type(m).__name__.lower() for m in model.modules() if not _is_patched(m)):
        together = (index.mT == index).tril()[None, None]
        given["attention_mask"] = torch.where(together, 0.0, torch.finfo(torch.float32).min)
    wanted = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:5]).logits, model(ids[:, 5:]).logits], 1)
    close(model(ids, cu_seq_lens_q=torch.tensor([0, 4, 5, STEPS]), **given).logits, wanted)
    close(model(ids, seq_idx=index, **given).logits, wanted)


def _without_attention(model):
    """The model, with attention that adds nothing: no mask can tell it which tokens to leave out."""
    for module in model.modules():
        if type(module).__name__.endswith("TextAttention"):
            module.o_proj.weight.zero_()
    return model


def _is_patched(module):
    return "_scanl_reads" in module.__dict__


@each_kind
@torch.no_grad()
def test_copies_are_their_own(name, model):
    wanted = model(tokens()).logits
    hub.accelerate(model)
    twin = copy.deepcopy(model)
    close(twin(tokens()).logits, wanted)
    hub.restore(twin)
    assert torch.equal(twin(tokens()).logits, wanted)
    assert len(hub.accelerate(model).accelerated) == len(hub.accelerate(twin).accelerated)


def test_concurrency():
    """Calls from several threads keep their own padding; what torch.save writes and torch.compile makes is the same."""
    model = CASES["mamba"].build()
    hub.accelerate(model)
    masks = [padding(), padding(left=False), torch.ones_like(tokens())] * 2
    with torch.no_grad():
        wanted = [model(tokens(), attention_mask=mask).logits for mask in masks]
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda mask: torch.no_grad()(model)(tokens(), attention_mask=mask).logits, masks))
        assert all(map(torch.equal, found, wanted))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(tokens(), attention_mask=masks[0]).logits, wanted[0])
        compiled = torch.compile(model, backend="eager")
        close(compiled(tokens(), attention_mask=masks[0], use_cache=False).logits, wanted[0])


def test_nothing_but_the_object_is_changed():
    first, second = CASES["mamba"].build(), CASES["mamba"].build()
    kinds = [(kind, kind.forward) for kind in map(type, first.modules())]
    hub.accelerate(first)
    assert all(kind.forward is before for kind, before in kinds)
    assert [type(module) for module in second.modules()] == [kind for kind, _ in kinds]
    assert "forward" not in second.backbone.layers[0].mixer.__dict__
    assert first.state_dict().keys() == second.state_dict().keys()
    assert repr(first) == repr(second)
    hub.restore(first)
    assert [type(module) for module in first.modules()] == [kind for kind, _ in kinds]


def test_what_is_left_alone_has_a_reason():
    model = CASES["mamba"].build()
    mixer = model.backbone.layers[0].mixer
    mixer.forward = lambda *args, **kwargs: None
    report = hub.accelerate(model)
    assert [bool(row.now) for row in report] == [False, True]
    assert "its forward was replaced by another library" in str(report)
    hub.restore(model)
    assert "forward" in mixer.__dict__
    assert "has no recurrent module" in str(hub.accelerate(torch.nn.Linear(2, 2)))
    report = hub.accelerate(CASES["mamba"].build().to("meta"))
    assert not report.accelerated
    assert "its weights are not loaded yet, or are offloaded; accelerate the model when they are" in str(report)


@torch.no_grad()
def test_classes_that_inherit_from_a_module_are_accelerated():
    """Unless they bring a forward of their own."""
    model = CASES["mamba"].build()
    mixer, wanted = model.backbone.layers[0].mixer, model(tokens()).logits
    mixer.__class__ = type("Heir", (type(mixer),), {})
    assert [row.kind for row in hub.accelerate(model).accelerated] == ["Heir", "MambaMixer"]
    close(model(tokens()).logits, wanted)
    hub.restore(model)
    mixer.__class__ = type("Heir", (type(mixer),), {"forward": lambda self, *args, **_: args[0]})
    report = hub.accelerate(model)
    assert [bool(row.now) for row in report] == [False, True]
    assert "its forward is Heir's own" in str(report)


@torch.no_grad()
def test_recurrent_gemma_wider_than_the_cache_of_a_processor(monkeypatch):
    """Gates are computed for as many steps at once as fit; where one step does not, one by one."""
    model = CASES["recurrent_gemma"].build()
    wanted = model(tokens()).logits
    hub.accelerate(model)
    for numbers in (1, 2 * 32, 5 * 2 * 32):  # of one step there are 2 rows of 32
        monkeypatch.setattr(patches.recurrent_gemma, "CACHED_NUMBERS", numbers)
        close(model(tokens()).logits, wanted)


def test_kernels_that_transformers_found_are_known(monkeypatch):
    """On CUDA a module keeps its kernels only when all of them are there."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as choose
    from transformers.models.mamba import modeling_mamba

    from scanl.hub.accelerate import _has_kernels

    patch, found = patches.get("mamba"), types.ModuleType("kernels_for_a_test")
    monkeypatch.setitem(sys.modules, found.__name__, found)
    for name, expected in (("mamba_selective_scan", False), ("causal_conv1d_fn", True)):
        setattr(found, name, lambda x: x)
        monkeypatch.setattr(modeling_mamba, name, choose(name, found.__name__)(lambda x: -x))
        _has_kernels.cache_clear()
        assert _has_kernels(modeling_mamba.MambaMixer, patch) is expected
    _has_kernels.cache_clear()


def test_an_old_transformers_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.9.1")
    with pytest.raises(
        ConfigError, match=r"accelerate: transformers is 5\.9\.1, expected at least 5\.23; pip install -U transformers"
    ):
        hub.accelerate(CASES["mamba"].build())


def test_errors():
    with pytest.raises(ConfigError, match=r"accelerate: model is a str, expected a torch\.nn\.Module"):
        hub.accelerate("mamba")
    model = CASES["mamba"].build()
    hub.accelerate(model)
    ids, offsets = tokens(1), torch.tensor([0, 4, STEPS])
    with pytest.raises(
        ShapeError, match="cu_seq_lens_q is given for input_ids of batch 2, expected a batch of 1: packed sequences are"
    ):
        model(tokens(2), cu_seq_lens_q=offsets)
    with pytest.raises(ShapeError, match=r"seq_idx has shape \(1, 3\), expected \(1, 13\) of input_ids"):
        model(ids, seq_idx=torch.zeros(1, 3))
    with pytest.raises(
        ConfigError,
        match="attention_mask marks padding in packed sequences, expected padding or packing, not both; pack without",
    ):
        model(ids, cu_seq_lens_q=offsets, attention_mask=padding(1))
    name = cache_name(model)
    cache = getattr(model(ids, use_cache=True), name)
    with pytest.raises(ConfigError, match="given with a cache that holds a state, expected an empty cache"):
        model(ids, cu_seq_lens_q=offsets, **{name: cache}, use_cache=True)
    close(model(ids).logits, CASES["mamba"].build()(ids).logits)  # an error leaves nothing behind


def test_every_patch_is_tried():
    """Every class that a patch names is in a model of `hub_models.py`, and every model has a patched module."""
    found = set()
    for case in CASES.values():
        model = case.build()
        report = hub.accelerate(model)
        assert report.accelerated
        found |= {row.kind for row in report.accelerated}
    paths = {path for name in patches.names() for path in patches.get(name).modules}  # torch.nn: test_torch_rnn.py
    assert {path.split(".")[1] for path in paths if not path.startswith("torch.nn.")} == found


class Wrapped(nn.Module):
    """A module as an adapter wraps it: its weight is there, and its call adds something."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs) + 1


@each_kind
@torch.no_grad()
def test_hooks_and_adapters_have_an_effect_or_are_refused(name, model):
    """Of each module with weights inside a patched one, and of each that the original calls."""

    def calls():
        called = set()
        hooks = [m.register_forward_hook(lambda m, *_: called.add(m)) for m in model.modules()]
        try:
            model(tokens())
        finally:
            for hook in hooks:
                hook.remove()
        return called

    called = calls()
    hub.accelerate(model)
    for kind in {type(module) for module in model.modules() if _is_patched(module)}:
        patched = next(module for module in model.modules() if type(module) is kind)
        children = [
            (path, module)
            for path, module in patched.named_modules()
            if path and (module in called or list(module.parameters(recurse=False)))
        ]
        for path, module in children:
            seen = []
            hook = module.register_forward_hook(lambda m, *_, seen=seen: seen.append(m))
            if path in patched._scanl_reads:
                with pytest.raises(ConfigError, match=f": {path} has a forward hook, expected none because"):
                    model(tokens())
                hook.remove()
                setattr(patched, path, Wrapped(module))
                with pytest.raises(ConfigError, match=f": {path} is a {__name__}.Wrapped, expected a plain "):
                    model(tokens())
                hub.restore(model)
                (reason,) = [row.note for row in hub.accelerate(model) if not row.now]
                assert (
                    reason == f"its {path} is a {__name__}.Wrapped, and the patch reads the weights of a plain module"
                )
                setattr(patched, path, module)
                hub.accelerate(model)
            else:
                model(tokens())
                assert seen or path.rpartition(".")[0] in patched._scanl_reads
                hook.remove()
    model(tokens())


def test_a_hook_before_the_patch_leaves_a_module_alone():
    model = CASES["mamba"].build()
    hook = model.backbone.layers[1].mixer.dt_proj.register_forward_hook(lambda *_: None)
    first, second = hub.accelerate(model)
    assert first.now
    assert (second.now, second.note.startswith("accelerated MambaMixer: dt_proj has a forward hook")) == ("", True)
    hook.remove()
    assert len(hub.accelerate(model).accelerated) == 2


@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma", "xlstm"])
def test_checkpointing_is_refused_what_it_would_lose(name, model):
    """Layers that run once more, after the model's call, would take padding for tokens."""
    hub.accelerate(model)
    model.train()
    given = {"attention_mask": padding()}, {"cu_seq_lens_q": torch.tensor([0, 4, STEPS])}
    model(tokens(), **given[0])
    model.activation_checkpointing_enable()
    try:
        for batch, lost in zip((2, 1), ("padding", "packing"), strict=True):
            with pytest.raises(ConfigError, match=f"{lost} cannot be combined with gradient checkpointing; call gradi"):
                model(tokens(batch), **given[batch == 1], use_cache=False)
        model(tokens(), use_cache=False)
    finally:
        model.activation_checkpointing_disable()


@pytest.mark.parametrize("name", ["rwkv", "rwkv_rescaled", "xlstm", "xlstm_fused"])
@torch.no_grad()
def test_state_outside_a_cache_means_the_same(name, model):
    """What the original left off ours takes up, and the other way round; packed sequences do not."""
    begin, end, field = tokens()[:, :7], tokens()[:, 7:], cache_name(model)
    wanted = model(tokens()).logits[:, 7:]
    state = getattr(model(begin), field)
    hub.accelerate(model)
    close(model(end, **{field: state}).logits, wanted)
    state = getattr(model(begin), field)
    hub.restore(model)
    close(model(end, **{field: state}).logits, wanted)
    hub.accelerate(model)
    offsets = torch.tensor([0, 4, STEPS])
    state = getattr(model(tokens(1), cu_seq_lens_q=offsets), field)
    close(
        model(tokens(1), **{field: state}).logits, model(torch.cat([tokens(1)[:, 4:], tokens(1)], 1)).logits[:, -STEPS:]
    )
    with pytest.raises(ConfigError, match="given with a cache that holds a state, expected an empty cache"):
        model(tokens(1), cu_seq_lens_q=offsets, **{field: state})


@pytest.mark.parametrize("name", ["xlstm"])
@torch.no_grad()
def test_prompts_that_the_model_cuts(name, model):
    hub.accelerate(model)
    wanted = model(tokens()[:1, 5:]).logits
    offsets = torch.tensor([0, 4, STEPS])
    model.config.max_inference_chunksize = 4
    try:
        close(model(tokens(), attention_mask=padding()).logits[:1, 5:], wanted)
        with pytest.raises(
            ConfigError, match="packed sequences of 13 tokens come in parts of 4, expected one part; raise"
        ):
            model(tokens(1), cu_seq_lens_q=offsets)
    finally:
        model.config.max_inference_chunksize = 16384


@pytest.mark.parametrize("name", ["recurrent_gemma", "recurrent_gemma_wide"])
@torch.no_grad()
def test_recurrent_gemma_keeps_its_state_in_the_cache(name, model):
    """Two prompts at once, one of which begins with a single token; documents told by their positions."""
    hub.accelerate(model)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    found = [[], []]
    for begin, end in ((0, 1), (1, 6), (6, STEPS)):
        for ids, cache, logits in zip((tokens(), tokens().flip(1)), caches, found, strict=True):
            logits.append(model(ids[:, begin:end], **{cache_name(model): cache}, use_cache=True).logits)
    close(torch.cat(found[0], 1), model(tokens()).logits)
    close(torch.cat(found[1], 1), model(tokens().flip(1)).logits)
    positions = torch.cat([torch.arange(4), torch.arange(9)])[None]
    wanted = torch.cat([model(tokens(1)[:, :4]).logits, model(tokens(1)[:, 4:]).logits], 1)
    close(model(tokens(1), position_ids=positions, use_cache=False).logits, wanted)
    with pytest.raises(
        ConfigError, match=r"no recurrent state for layer 0, expected DynamicCache\(config=model.config\)"
    ):
        model(tokens(), **{cache_name(model): DynamicCache()}, use_cache=True)
    block = model.model.layers[0].temporal_block
    hub.restore(model)
    hub.accelerate(block)
    with pytest.raises(ConfigError, match="does not know the index of its layer in the cache; accelerate the whole"):
        model(tokens(), use_cache=True)


@pytest.mark.parametrize("name", ["recurrent_gemma", "recurrent_gemma_wide"])
@torch.no_grad()
def test_recurrent_gemma_begins_anew_at_position_0(name):
    """A new prompt beside a cache that has served another, in all rows or in one; keys and values are set aside."""
    model = CASES[name].build()
    for layer in model.model.layers:
        if hasattr(layer.temporal_block, "o_proj"):
            layer.temporal_block.o_proj.weight.zero_()
    hub.accelerate(model)

    def used():
        cache = DynamicCache(config=model.config)
        model(tokens().flip(1), **{cache_name(model): cache}, use_cache=True)
        return cache

    def fed(cache, ids, places, mask=None):
        given = {} if mask is None else {"attention_mask": torch.cat([torch.ones(2, STEPS).long(), mask], 1)}
        return model(ids, **{cache_name(model): cache}, position_ids=places, use_cache=True, **given).logits

    alone, after = model(tokens()).logits, model(torch.cat([tokens().flip(1), tokens()], 1)).logits[:, STEPS:]
    places, new = torch.arange(STEPS)[None], torch.tensor([[True], [False]])
    for cut in (1, 6):
        both, one = used(), used()
        for begin, end in ((0, cut), (cut, STEPS)):
            ids, at = tokens()[:, begin:end], places[:, begin:end]
            close(fed(both, ids, at), alone[:, begin:end])
            found = fed(one, ids, torch.where(new, at, STEPS + at))
            close(found, torch.where(new[..., None], alone, after)[:, begin:end])
    mask = padding()
    found = fed(used(), tokens(), (mask.cumsum(1) - 1).clamp_min(0), mask)
    close(found[:1, 5:], model(tokens()[:1, 5:]).logits)
    close(found[1:], alone[1:])


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba"])
def test_exact_models_have_the_same_bits_in_pieces(name, model):
    """Jamba has attention and a mixture of experts beside its Mamba layers."""
    ids = tokens(3)
    hub.accelerate(model, exact=True)
    with torch.no_grad():
        whole = model(ids).logits
        assert torch.equal(model(ids[1:2]).logits, whole[1:2])
        for cuts in ([5, 6], range(1, STEPS)):
            assert torch.equal(in_pieces(model, ids[:2], cuts), whole[:2])
        padded = torch.cat([ids.new_zeros(3, 4), ids], 1)
        mask = (padded != 0).long()
        places = {"position_ids": mask.cumsum(1) - 1} if name == "jamba" else {}
        assert torch.equal(model(padded, attention_mask=mask, **places).logits[:, 4:], whole)
        hub.accelerate(model)  # no longer exact
        assert not torch.equal(in_pieces(model, ids[:2], range(1, STEPS)), model(ids[:2]).logits)

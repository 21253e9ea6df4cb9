"""Sessions of accelerated models: the tokens are those of `generate` without one."""

import pytest
import torch

import scanl
from hub_models import CASES
from scanl import hub
from scanl.errors import ConfigError, ShapeError
from scanl.hub import CacheSession
from scanl.models import PromptLookup

pytest.importorskip("transformers", reason="the models are of transformers")

OPTIONS = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": None}
TEXT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5]])


def accelerated(name):
    model = CASES[name].build()
    hub.accelerate(model)
    return model


def counted(monkeypatch, session):
    lengths, read = [], session._read

    def counting(tokens, rows):
        lengths.append(tokens.shape[1])
        return read(tokens, rows)

    monkeypatch.setattr(session, "_read", counting)
    return lengths


def generated(model, text, **options):
    mask = torch.ones_like(text)  # or else `generate` masks tokens that are the padding's
    return model.generate(text, attention_mask=mask, **{**OPTIONS, **options})


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next"])
def test_turns_forks_and_drafts_change_no_token(name, monkeypatch):
    model = accelerated(name)
    session = CacheSession(model, draft=PromptLookup())
    with scanl.exact():
        for sampled in (True, False):
            ids = []
            for how in ({}, {"custom_generate": session}):
                torch.manual_seed(0)
                ids.append(generated(model, TEXT, do_sample=sampled, **how))
            assert torch.equal(*ids)
        forked = session.fork()
        more, other = torch.cat([ids[0], TEXT[:, :3]], 1), torch.cat([TEXT, TEXT[:, 4:9]], 1)
        for text in (more, other):  # the next turn, and one that leaves the text of the first
            assert torch.equal(generated(model, text, custom_generate=session), generated(model, text))
        lengths = counted(monkeypatch, forked)
        generated(model, more, custom_generate=forked)
        assert lengths[0] < len(more[0]) - len(TEXT[0])


@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_a_fork_leaves_the_cache_of_its_origin(name, monkeypatch):
    model = accelerated(name)
    session, logits, read = CacheSession(model), [], CacheSession._read

    def reading(self, tokens, rows):
        logits.append(read(self, tokens, rows))
        return logits[-1]

    monkeypatch.setattr(CacheSession, "_read", reading)
    with scanl.exact():
        first = generated(model, TEXT, custom_generate=session)
        forked = session.fork()
        for one, text in ((forked, torch.cat([first, TEXT], 1)), (session, torch.cat([first, TEXT[:, 4:9]], 1))):
            ids = generated(model, text, custom_generate=one)
            assert torch.equal(logits[-1], model(ids[:, :-1]).logits[:, -1:])
            assert torch.equal(ids, generated(model, text))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("draft", [None, PromptLookup()])
def test_a_turn_that_was_interrupted_is_forgotten(error, draft, monkeypatch):
    """A short text, an interrupted turn of it, a long text, and one that leaves the long one past the first end."""
    model = accelerated("mamba")
    session, logits = CacheSession(model, draft=draft), []
    read = session._read

    def reading(tokens, rows):
        logits.append(read(tokens, rows)[:, :1])
        if len(logits) == 2:
            raise error  # the cache is written
        return logits[-1].expand(-1, rows, -1)

    monkeypatch.setattr(session, "_read", reading)
    short, options = torch.tensor([[7, 7, 2]]), {"max_new_tokens": 1, "custom_generate": session}
    with scanl.exact():
        generated(model, short, **options)
        with pytest.raises(error):
            generated(model, torch.cat([short, TEXT], 1), **options)
        for text in (torch.cat([TEXT, TEXT], 1), torch.cat([TEXT, TEXT[:, :5]], 1)):
            generated(model, text, **options)
            assert torch.equal(logits[-1], model(text).logits[:, -1:])


def test_a_turn_goes_back_to_the_end_of_one_that_it_begins_with(monkeypatch):
    """Also when another turn was interrupted since."""
    model = accelerated("mamba")
    session = CacheSession(model)
    first = generated(model, TEXT, custom_generate=session)
    monkeypatch.setattr(CacheSession, "_piece", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generated(model, torch.cat([first, TEXT], 1), custom_generate=session)
    monkeypatch.undo()
    lengths = counted(monkeypatch, session)
    generated(model, torch.cat([first, TEXT[:, :2]], 1), custom_generate=session)
    assert lengths[0] == 3


@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_any_text_follows_any_other(name):
    """Also those that leave it at the end of a turn, twice, and around it, and those that are all read already."""
    model = accelerated(name)
    session = CacheSession(model)
    with scanl.exact():
        first = generated(model, TEXT, custom_generate=session)  # all but its last token is read
        other = 1 + first[:, -4:] % 7
        texts = [torch.cat([first, TEXT[:, at : at + 2]], 1) for at in (0, 4, 7)]
        texts += [torch.cat([first[:, :-cut], other[:, -cut:]], 1) for cut in (1, 2, 3)]
        ours = first
        for text in (*texts, first[:, :-1], first[:, :-2], TEXT, TEXT[:, :1], first, None, None):
            text = ours[:, :-1] if text is None else text  # what is read, and no more
            ours = generated(model, text, max_new_tokens=2, custom_generate=session)
            plain = generated(model, text, max_new_tokens=2)
            assert torch.equal(ours, plain)


def test_the_criteria_of_generate_apply():
    model = accelerated("mamba")
    end = int(generated(model, TEXT)[0, -5])
    session = CacheSession(model, draft=PromptLookup())
    assert torch.equal(*(generated(model, TEXT, eos_token_id=end, **how) for how in ({}, {"custom_generate": session})))
    made = generated(model, TEXT, custom_generate=session, return_dict_in_generate=True)
    assert torch.equal(made.sequences, generated(model, TEXT))


def test_what_it_cannot_do_is_refused():
    model = accelerated("mamba")
    session = CacheSession(model)
    with pytest.raises(ConfigError, match=r"model is a MambaForCausalLM, expected one after hub\.accelerate"):
        CacheSession(CASES["mamba"].build())
    for name in ("rwkv", "xlstm", "minimax"):
        with pytest.raises(ConfigError, match="which keeps its states in no Cache of transformers"):
            CacheSession(accelerated(name))
    with pytest.raises(ConfigError, match="model is another one, expected the session's own"):
        generated(accelerated("mamba"), TEXT, custom_generate=session)
    with pytest.raises(ShapeError, match=r"input_ids has shape \(2, 13\) with 1 beams, expected \(1, T\)"):
        generated(model, TEXT.expand(2, -1), custom_generate=session)
    with pytest.raises(ShapeError, match="attention_mask masks tokens"):
        model.generate(TEXT, attention_mask=torch.tensor([[0] + [1] * 12]), custom_generate=session, **OPTIONS)
    with pytest.raises(ConfigError, match="output_scores is True, expected False"):
        generated(model, TEXT, custom_generate=session, output_scores=True, return_dict_in_generate=True)

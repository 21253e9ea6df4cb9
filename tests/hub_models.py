"""Tiny models of transformers with random weights, one for each class of mixers, for the laws of `test_hub.py`.

`MODELS[name]()` builds one; `Exempt` says which laws the original itself breaks, so that ours is compared with the
whole prompt at once, or each sequence alone, instead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

VOCAB = 50


class Case(NamedTuple):
    """build: the model.   wrong: what the original gets wrong, among "pieces", "steps", "padding", "cache"."""

    build: Callable[[], Any]
    wrong: frozenset[str] = frozenset()


CASES: dict[str, Case] = {}


def case(*wrong: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = Case(build, frozenset(wrong))
        return build

    return add


def _made(model: type, config: Any) -> Any:
    torch.manual_seed(0)
    return model(config).eval()


@case("pieces")
def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    return _made(MambaForCausalLM, MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=VOCAB))


@case("pieces")
def falcon_mamba():
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    config = FalconMambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=VOCAB)
    return _made(FalconMambaForCausalLM, config)


@case("pieces")
def jamba():
    from transformers import JambaConfig, JambaForCausalLM

    config = JambaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        num_experts=2,
        num_experts_per_tok=1,
        vocab_size=VOCAB,
    )
    return _made(JambaForCausalLM, config)


@case("pieces")
def zamba():
    from transformers import ZambaConfig, ZambaForCausalLM

    config = ZambaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        vocab_size=VOCAB,
    )
    return _made(ZambaForCausalLM, config)

"""FalconMambaForCausalLM: Mamba with norms over δ, B and C."""

from collections.abc import Mapping
from typing import Any, ClassVar

from scanl import layers
from scanl.hub.formats.base import blocks, register
from scanl.hub.formats.mamba import MambaFormat
from scanl.models import LanguageModel


@register("falcon_mamba")
class FalconMambaFormat(MambaFormat):
    architecture: ClassVar = "FalconMambaForCausalLM"
    defaults: ClassVar = {**MambaFormat.defaults, "mixer_rms_eps": 1e-6}

    @classmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        arguments = MambaFormat.arguments(config)
        stack = arguments["stack"]
        options = {**stack["layer_options"], "norm_eps": config["mixer_rms_eps"]}
        return {**arguments, "stack": {**stack, "layer_options": options}}

    @staticmethod
    def entries(model: LanguageModel) -> dict[str, Any]:
        mixer = blocks(model)[0].mixer
        assert isinstance(mixer, layers.Mamba)
        return {**MambaFormat.entries(model), "mixer_rms_eps": mixer.norm_eps}

    @classmethod
    def holds(cls, model: LanguageModel) -> bool:
        return super(MambaFormat, cls).holds(model) and cls.normed(model)

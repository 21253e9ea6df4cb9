"""FalconMambaForCausalLM: Mamba whose δ, B and C are normed."""

from collections.abc import Mapping
from typing import Any, ClassVar

from scanl import layers
from scanl.hub.families.base import blocks, register
from scanl.hub.families.mamba import Mamba
from scanl.models import LanguageModel


@register("falcon_mamba")
class FalconMamba(Mamba):
    architecture: ClassVar = "FalconMambaForCausalLM"
    defaults: ClassVar = {**Mamba.defaults, "mixer_rms_eps": 1e-6}

    @staticmethod
    def arguments(config: Mapping[str, Any]) -> dict[str, Any]:
        arguments = Mamba.arguments(config)
        return {**arguments, "layer_options": {**arguments["layer_options"], "norm_eps": config["mixer_rms_eps"]}}

    @staticmethod
    def entries(model: LanguageModel) -> dict[str, Any]:
        mixer = blocks(model)[0].mixer
        assert isinstance(mixer, layers.Mamba)
        return {**Mamba.entries(model), "mixer_rms_eps": mixer.norm_eps}

    @classmethod
    def holds(cls, model: LanguageModel) -> bool:
        return super(Mamba, cls).holds(model) and cls.normed(model)

"""The layers by name, and what finds, makes and registers them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from scanl.layers.base import Layer
from scanl.options import check_names
from scanl.registry import Registry

layers: Registry[Layer] = Registry(
    "layer",
    package="scanl.layers",
    listed="`scanl list`",
    use="scanl.layers.build('{name}', dim)",
    advice={
        name: sentence
        for names, sentence in (
            (
                "deer, elk",
                "it is Newton's method over time, a way to run a nonlinear layer: give its option solver 'newton'",
            ),
            (
                "transformer, vanilla_transformer",
                "give 'attention', or 'window_attention' for a state of constant size",
            ),
            ("flash_attention, flash_attention_2", "it is a kernel of softmax attention: 'attention' runs torch's"),
            (
                "flash_conv, flash_fft_conv",
                "it is a kernel of long convolutions: 'h3', 'hyena' and 's4' run scanl.ops.long_convolution",
            ),
            ("chrono, chrono_initialization", "it is a way to start gates: 'lstm' and 'gru' have the option t_max"),
            (
                "limit_cycle, limit_cycle_initialization",
                "it is a way to start: 'elman' and 'gru' have the option init 'limit_cycle'",
            ),
            (
                "layer_normalization, layernorm",
                "it is a part: 'layernorm_lstm' and 'layernorm_elman' have it, and Stack the option norm",
            ),
            (
                "gradient_clipping, clip",
                "it is a part of training: `scanl train` has the options --clip and --clip-value",
            ),
            ("transnormer", "it is 'diag_attention' in the lower half of a stack and 'norm_attention' in the upper"),
            (
                "LCP, lipschitz_coefficient_penalty",
                "it is a penalty of recurrent backpropagation: `rbp` has the option penalty",
            ),
            ("scyfi", "it finds fixed points and cycles of piecewise-linear networks: see scanl.inspect.orbits"),
            ("short_convolution, short_conv", "it is a part of other layers: scanl.layers.ShortConvolution"),
            (
                "parallel_scan, associative_scan",
                "it is an op: scanl.ops.linear_scan, or scanl.ops.associative_scan for any operator",
            ),
            ("token_shift", "it is a part of 'rwkv4' to 'rwkv7'"),
        )
        for name in names.split(", ")
    },
)
register, get = layers.add, layers.get

# Layers that mix features instead of time, in layers/channel/. Registered with `@channel_mixers.add("gated_mlp")`.
channel_mixers: Registry[Layer] = Registry(
    "channel mixer",
    package="scanl.layers.channel",
    listed="`scanl list`",
    use="Stack(dim, depth, layer, channel_mixer='{name}')",
)

L = TypeVar("L", bound=Layer)


def preset(name: str, **options: Any) -> Callable[[type[L]], type[L]]:
    """Decorator: register a published model that is another layer with particular options.

    The decorated class subclasses that layer. It has a docstring, `equation` and `source`, and no code. The options
    become defaults of its constructor, so a caller can override them.

    >>> from scanl.layers import LRU
    >>> @preset("slow_lru", r_min=0.99)
    ... class SlowLRU(LRU):
    ...     "An LRU that starts with a long memory."
    >>> SlowLRU(4).preset_options, build("slow_lru", 4, r_max=0.999).name
    ({'r_min': 0.99}, 'slow_lru')
    >>> layers.remove("slow_lru")
    """

    def add(cls: type[L]) -> type[L]:
        (base,) = cls.__bases__
        check_names(name, base, options)
        start: Any = base.__init__
        signature = inspect.signature(start)
        parameters = [p.replace(default=options.get(p.name, p.default)) for p in signature.parameters.values()]
        inherited = [
            p.replace(default=options[p.name], kind=p.KEYWORD_ONLY)
            for p in inspect.signature(base).parameters.values()
            if p.name in options and p.name not in signature.parameters
        ]
        last = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        signature = signature.replace(parameters=[*parameters[:last], *inherited, *parameters[last:]])

        @functools.wraps(start)
        def __init__(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            start(*bound.args, **bound.kwargs)

        cls.preset_of, cls.preset_options = base, options
        vars(__init__)["__signature__"] = signature
        type.__setattr__(cls, "__init__", __init__)
        return register(name)(cls)

    return add


def names(presets: bool = True) -> list[str]:
    """Return the registered names, sorted; without presets if `presets` is False."""
    return [name for name in layers.names() if presets or get(name).preset_of is None]


def classes() -> list[type[Layer]]:
    """Return the registered layers and presets, in the order of their names."""
    return [get(name) for name in layers.names()]


def build(name: str, dim: int, **options: Any) -> Layer:
    """Make a registered layer: `build("lru", 256, r_min=0.9)`.

    Unknown names and options raise ConfigError with the nearest known one.
    """
    cls = get(name)
    check_names(name, cls, options)
    return cls(dim, **options)

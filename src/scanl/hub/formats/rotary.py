"""The options of rotary positions in config.json: an object, or before transformers 5 entries at the top level."""

from collections.abc import Mapping
from typing import Any

from scanl.errors import ConfigError


def gathered(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config with the options among `defaults` in its entry rope_parameters."""
    rope = config.get("rope_parameters") or {}
    if isinstance(rope, Mapping):
        rope = {key: config[key] for key in defaults if key in config} | dict(rope)
    return {**config, "rope_parameters": rope}


def checked(options: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options. Raises ConfigError for another kind of positions and for numbers that are not above 0."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"rope_parameters is {options!r}, expected an object of options")
    rope = {**defaults, **options}
    if rope["rope_type"] != "default":
        raise ConfigError(f"rope_type is {rope['rope_type']!r}, expected 'default': scanl has no other option")
    for key in ("rope_theta", "partial_rotary_factor"):
        if isinstance(rope[key], bool) or not isinstance(rope[key], int | float) or not rope[key] > 0:
            raise ConfigError(f"{key} is {rope[key]!r}, expected a number above 0")
    return rope

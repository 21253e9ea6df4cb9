"""Options that a layer cannot use are refused by its name: `WRONG` and `REFUSED` in the layers' test files say which.

WRONG has (name, options, message), built at width `DIM`. REFUSED has (call, message), for what needs another call.
"""

import pytest

from by_hand import DIM
from layer_files import declared
from scanl import layers
from scanl.errors import ConfigError


@pytest.mark.parametrize(("name", "options", "message"), [case for cases in declared("WRONG") for case in cases])
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=f"^{name}: .*{message}"):
        layers.build(name, DIM, **options)


@pytest.mark.parametrize(("build", "message"), [case for cases in declared("REFUSED") for case in cases])
def test_wrong_calls_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()

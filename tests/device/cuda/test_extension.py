"""The compiled module that launches graphs, as far as its source says what it takes."""

from __future__ import annotations

import inspect
import re

import pytest

from quire.device.cuda.build import SOURCES
from quire.device.cuda.extension import Extension


@pytest.mark.parametrize("function", ["pointer", "host_copy", "replay"])
def test_arguments_have_the_names_that_python_gives(function: str) -> None:
    source = (SOURCES / "launch.cpp").read_text()
    found = re.search(rf'm\.def\("{function}",(.*?)\);\n', source, re.DOTALL)
    assert found is not None
    described = inspect.signature(getattr(Extension, function)).parameters
    assert re.findall(r'nb::arg\("(\w+)"\)', found[1]) == list(described)[1:]

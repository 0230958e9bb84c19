"""What `serve run quire.scale.ray:app` takes."""

from __future__ import annotations

import pytest

from quire.llm.settings import Settings, configured
from quire.scale.arguments import Arguments


def test_arguments_cover_those_of_the_python_api() -> None:
    assert Settings.__annotations__.keys() <= Arguments.model_fields.keys()


def test_texts_of_the_command_line_become_settings() -> None:
    given = {"replicas": "2", "threads": "1", "kv_skip_layers": "5,11", "kv_group_size": "32"}
    arguments = Arguments.model_validate({**given, "kv_bits": "4", "kv_scheme": "uniform"})
    assert arguments.replicas == 2
    settings = arguments.model_dump(include=set(Settings.__annotations__))
    engine, _ = configured(arguments.model, settings)
    assert (engine.threads, engine.kv_skip_layers) == (1, (5, 11))
    assert engine.kv_format.group_size == 32


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_bit": "4"}, "kv_bit"),
        ({"kv_group_size": "48"}, "kv_group_size"),
        ({"kv_skip_layers": "5,x"}, "kv_skip_layers"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Arguments.model_validate(given)

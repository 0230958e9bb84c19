"""No refusal of a field is in a parser's words, whatever the field and the value."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from quire.api.routes import OPERATIONS
from quire.api.shared.field_errors import explain
from quire.api.shared.schema import Wire

TYPED = [{"type": "unknown"}]
VALUES = (True, -5, 10**30, 0.5, "", "x" * 5000, [], [None], [0] * 2000, {"a": []}, TYPED)
PARSERS_WORDS = ("nput should", "should have", "valid integer", "valid string", "unable to parse")
TAGS = (" hosted", "_,")  # of unions; no client can send them
UNKNOWN_ERROR = "of another form"


def refusals() -> Iterator[str]:
    """Return the message about each value in each field of each body."""
    for schema in {each.body for each in OPERATIONS if each.body is not None}:
        assert issubclass(schema, Wire)
        for value in VALUES:
            fields = {field.alias or name: value for name, field in schema.model_fields.items()}
            try:
                schema.model_validate(fields)
            except ValidationError as error:
                for detail in error.errors(include_url=False):
                    yield explain(schema, [detail], {}).message


def test_every_refusal_of_a_body_is_in_plain_words() -> None:
    messages = list(refusals())
    assert len(messages) > 1000
    for message in messages:
        assert not any(words in message for words in (*PARSERS_WORDS, *TAGS, UNKNOWN_ERROR)), (
            message
        )

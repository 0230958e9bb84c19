"""The servers of `tests/api`: a scripted engine behind the real application."""

from tests.api.conftest import serve, shared, tokenizer  # noqa: F401

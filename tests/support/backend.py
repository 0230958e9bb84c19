"""The library's object behind a tokenizer."""

from __future__ import annotations

import tokenizers

from quire.text.codec import LocalCodec
from quire.text.tokenizer import Tokenizer


def backend_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return what a tokenizer of this process encodes with."""
    assert isinstance(tokenizer.codec, LocalCodec)
    return tokenizer.codec.backend

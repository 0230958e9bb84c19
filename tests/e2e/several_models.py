"""`quire` with a tokenizer that its first process must not open: that would hold up streams."""

from __future__ import annotations

import sys

from quire.cli import main
from quire.text.tokenizer import Tokenizer


def _open(folder: object) -> Tokenizer:
    raise AssertionError(f"the server itself opens the tokenizer of {folder}")


if __name__ == "__main__":
    Tokenizer.open = _open  # type: ignore[method-assign, assignment]
    sys.exit(main())

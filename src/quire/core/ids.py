"""Random names of requests and of what answers hold."""

from __future__ import annotations

import os


def new_id() -> str:
    """Return 128 random bits in hexadecimal. A UUID takes five times as long to make."""
    return os.urandom(16).hex()

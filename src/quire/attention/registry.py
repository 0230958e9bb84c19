"""The attention backends that a process uses. A new one: its module, and a line here."""

from __future__ import annotations

import mlx.core as mx

from quire.attention.backend import AttentionBackend, Backends
from quire.attention.paged import PagedBackend
from quire.attention.reference import ReferenceBackend


def open_backends(block_tokens: int) -> Backends:
    """The backends that work on this device, the fastest first; the reference serves the rest."""
    backends: list[AttentionBackend] = []
    if mx.default_device() == mx.gpu and mx.cuda.is_available():
        backends.append(PagedBackend(block_tokens))
    return Backends([*backends, ReferenceBackend()])

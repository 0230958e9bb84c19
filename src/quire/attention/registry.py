"""The attention backends that a process uses. A new one: its module, and a line here."""

from __future__ import annotations

from quire.attention.backend import Backends
from quire.attention.reference import ReferenceBackend


def open_backends() -> Backends:
    """The backends that work on this device, the fastest first; the reference serves the rest."""
    return Backends([ReferenceBackend()])

"""Unix sockets as addresses: `unix:PATH` in the place of a host."""

from __future__ import annotations

import sys

LONGEST_PATH = 103 if sys.platform == "darwin" else 107
"""Bytes of a Unix socket's path that the system takes (`sun_path` of `sockaddr_un`, less one)."""
_SCHEME = "unix:"


def unix_path(host: str) -> str | None:
    """Return the path of a Unix socket; None for other hosts."""
    return host.removeprefix(_SCHEME) if host.startswith(_SCHEME) else None

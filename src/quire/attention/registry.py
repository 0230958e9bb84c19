"""The attention backends of a process. A new one needs its module and a line here."""

from __future__ import annotations

import mlx.core as mx

from quire.attention.backend import AttentionBackend, Backends
from quire.attention.cpu import CPUBackend
from quire.attention.paged import PagedBackend, PortableBackend, TokensBackend
from quire.attention.paged.target import CUDA, METAL
from quire.attention.reference import ReferenceBackend
from quire.device.device import current_device
from quire.device.dtypes import DTYPES


def open_backends() -> Backends:
    """Return the working backends, fastest first; the reference serves the rest."""
    device = current_device()
    backends: list[AttentionBackend] = []
    if device.kernels is not None:
        backends.append(CPUBackend(device.kernels))
    if device.kernel_language == "cuda":
        backends += [PagedBackend(), TokensBackend(), PortableBackend(CUDA, [mx.float32])]
    if device.kernel_language == "metal":
        backends.append(PortableBackend(METAL, DTYPES.values()))
    return Backends([*backends, ReferenceBackend()])

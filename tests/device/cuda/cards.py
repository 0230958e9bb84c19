"""Cards by what decides how kernels are cut."""

from __future__ import annotations

from quire.device.cuda.driver import Card

H200 = Card(multiprocessors=132, shared=227 << 10, warpgroups=True)
RTX_4090 = Card(multiprocessors=128, shared=99 << 10)
"""Like all of the RTX 30 and 40 series in the shared memory of a thread block."""
RTX_3060 = Card(multiprocessors=28, shared=99 << 10)
CARDS = (H200, RTX_4090, RTX_3060)

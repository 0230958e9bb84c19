"""The constants that tell kernels of products how weights are coded."""

from __future__ import annotations

from quire.device.weights import FP4, FP8


def scale_defines(mode: str) -> dict[str, int]:
    """Return the constants of `common.cuh` for codes of a mode, see `Packing`."""
    return {"FLOATS": int(mode != "affine"), "WIDE_SCALES": {FP8: 1, FP4: 2}.get(mode, 0)}

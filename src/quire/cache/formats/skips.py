"""Layers that packed formats leave plain."""

from __future__ import annotations

from quire.cache.specs import LayerSpec
from quire.core.errors import ModelError


def skipped_layers(
    layout: tuple[LayerSpec, ...], wanted: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the layers that packed formats leave plain.

    Args:
        wanted: the operator's choice. None means the default: the last full-attention layer, unless
            it is the only one, because coding it ruins the output of some models.

    Raises:
        ModelError: a layer has no keys and values of its own.
    """
    if wanted is None:
        full = [index for index, spec in enumerate(layout) if spec.sees_all]
        return (full[-1],) if len(full) > 1 else ()
    for index in wanted:
        if not 0 <= index < len(layout):
            raise ModelError(
                f"there is no layer {index}: the model has {len(layout)} layers, from 0 on",
                setting="kv_skip_layers",
            )
        spec = layout[index]
        if spec.lacks_kv:
            raise ModelError(f"layer {index} {spec.lacks_kv}", setting="kv_skip_layers")
    return tuple(sorted(set(wanted)))

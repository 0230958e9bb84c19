"""Layers that packed formats leave plain."""

from __future__ import annotations

from quire.cache.specs import LayerSpec
from quire.core.errors import ModelError


def skipped_layers(
    layout: tuple[LayerSpec, ...], wanted: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the layers that packed formats leave plain.

    Args:
        wanted: as the operator asked; None is the default, the last full-attention layer, if it is
            not the only one. (Models are known whose output that one layer ruins when it is coded.)

    Raises:
        ModelError: a layer that has no keys and values of its own.
    """
    if wanted is None:
        full = [index for index, spec in enumerate(layout) if spec.sees_all]
        return (full[-1],) if len(full) > 1 else ()
    for index in wanted:
        if not 0 <= index < len(layout):
            raise ModelError(f"kv-skip-layers: layer {index}; the model has {len(layout)}")
        spec = layout[index]
        if spec.lacks_kv:
            raise ModelError(f"kv-skip-layers: layer {index} {spec.lacks_kv}")
    return tuple(sorted(set(wanted)))

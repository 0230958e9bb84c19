"""The stages behind a GGUF model that embeds texts, as the files of sentence-transformers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.core.sentence_modules import MODULES
from quire.models.weights.gguf import codes
from quire.models.weights.gguf.file import GGUF
from quire.models.weights.gguf.names import PROJECTIONS
from quire.models.weights.gguf.tensors import lazy_rows

_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Values of `pooling_type`: 0 is none, 4 ranks pairs of texts."""


def sentence_files(gguf: GGUF) -> dict[str, Any]:
    """Return JSON contents by file name; none if the file names no pooling of one vector."""
    mode = _MODES.get(gguf.get("pooling_type", 0))
    if mode is None:
        return {}
    found = _projections(gguf)
    stages = [("", "Transformer"), ("1_Pooling", "Pooling")]
    stages += [(folder, "Dense") for folder in found]
    files: dict[str, Any] = {
        MODULES: [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence.models.{kind}"}
            for number, (path, kind) in enumerate([*stages, ("", "Normalize")])
        ],
        "1_Pooling/config.json": {"pooling_mode": mode},
    }
    for folder, name in found.items():
        outputs, inputs = gguf.tensor(name).shape
        sizes = {"in_features": inputs, "out_features": outputs, "bias": False}
        files[f"{folder}/config.json"] = sizes
    return files


def sentence_tensors(gguf: GGUF) -> dict[str, dict[str, mx.array]]:
    """Return the tensors of the linear layers behind pooling, by file name.

    Raises:
        ModelError: a tensor has an unsupported type.
    """
    found = _projections(gguf)
    if not found:
        return {}
    rows = lazy_rows(gguf)
    ready = {}
    for folder, name in found.items():
        kind = gguf.tensors[name].kind
        try:
            weight = codes.numbers(kind, rows[name])
        except NotImplementedError as error:
            raise ModelError(
                f"{gguf.files[0]}: tensor {name!r} has unsupported type {kind.name}"
            ) from error
        ready[f"{folder}/model.safetensors"] = {"linear.weight": weight}
    return ready


def _projections(gguf: GGUF) -> dict[str, str]:
    """Return the names of the linear layers' tensors by folder, in order."""
    names = {f"{name[-1]}_Dense": f"{name}.weight" for name in PROJECTIONS}
    return {folder: name for folder, name in names.items() if name in gguf.tensors}

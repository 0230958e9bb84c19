"""Converts LoRA adapters of mlx-lm to PEFT's form.

`adapter_config.json` holds training arguments, of which `fine_tune_type` and `lora_parameters`
matter. `adapters.safetensors` has `lora_a`, `[in, rank]`, and `lora_b`, `[rank, out]`, for each
module; an expert stack's are `[experts, rank, in]` and `[experts, out, rank]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.values import Values
from quire.models.weights.names import Weights

FILE = "adapters.safetensors"
_TABLE = "embed_tokens"
_PARAMETERS = {"rank", "scale", "dropout", "keys"}


def peft_settings(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Convert mlx-lm's settings to PEFT's.

    Raises:
        ModelError: a setting has another type, or changes the result and is not supported.
    """
    said = Values(config, file=path)
    said.only("fine_tune_type", "lora")
    parameters = said.nested("lora_parameters")
    for name in parameters.values.keys() - _PARAMETERS:
        parameters.only(name, False)
    rank = parameters.integer("rank", default=8)
    scale = parameters.positive("scale", default=20.0)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank}


def peft_tensors(path: Path, tensors: Weights) -> Weights:
    """Rename and transpose an adapter's tensors as in PEFT.

    Raises:
        ModelError: a tensor is not a factor of a matrix.
    """
    ready: Weights = {}
    for name, array in tensors.items():
        module, _, factor = name.rpartition(".")
        if factor in ("lora_a", "lora_b") and array.ndim == 3:  # of experts, and turned already
            ready[f"{module}.lora_{factor[-1].upper()}.weight"] = array
            continue
        if factor not in ("lora_a", "lora_b") or array.ndim != 2:
            raise ModelError(
                f"{path}: tensor {name!r} of shape {list(array.shape)} is not supported: an "
                "mlx-lm adapter is read where it has two factors for each matrix"
            )
        letter = factor[-1].upper()
        end = f"lora_embedding_{letter}" if module.endswith(_TABLE) else f"lora_{letter}.weight"
        ready[f"{module}.{end}"] = array.T
    return ready

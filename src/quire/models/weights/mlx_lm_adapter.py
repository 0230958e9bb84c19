"""LoRA adapters as mlx-lm saves them, in the terms in which PEFT writes them.

`adapter_config.json` holds the arguments of the training, of which `fine_tune_type` and
`lora_parameters` change the result. `adapters.safetensors` has `lora_a`, `[in, rank]`, and
`lora_b`, `[rank, out]`, for each module.
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
    """Return PEFT's settings for those of mlx-lm.

    Raises:
        ModelError: a setting is of another type, or changes the result and is not computed.
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
    """Return an adapter's tensors as PEFT names and turns them.

    Raises:
        ModelError: a tensor is no factor of a matrix, such as those of experts.
    """
    ready: Weights = {}
    for name, array in tensors.items():
        module, _, factor = name.rpartition(".")
        if factor not in ("lora_a", "lora_b") or array.ndim != 2:
            raise ModelError(
                f"{path}: tensor {name!r} of shape {list(array.shape)} is not supported: an "
                "mlx-lm adapter is read where it has two factors for each matrix"
            )
        letter = factor[-1].upper()
        end = f"lora_embedding_{letter}" if module.endswith(_TABLE) else f"lora_{letter}.weight"
        ready[f"{module}.{end}"] = array.T
    return ready

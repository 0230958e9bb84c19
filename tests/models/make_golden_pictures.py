"""Writes gemma3n_pictures.safetensors: what timm's encoder makes of a picture of each size.

Run it after a change of the small model: `python -m tests.models.make_golden_pictures` (needs timm,
torch and transformers).
"""

from __future__ import annotations

from copy import deepcopy

import mlx.core as mx
import numpy as np
import torch
import transformers

from tests.models.test_gemma3n_pictures import (
    GOLDEN,
    GOLDEN_SIDES,
    published,
    rows_of_timm,
    shown,
)
from tests.support.gemma3n import gemma3n_seeing_config
from tests.support.tiny_models import random_weights


def main() -> None:
    config = transformers.AutoConfig.for_model(**deepcopy(gemma3n_seeing_config()))
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    weights = published(random_weights(gemma3n_seeing_config()), conversion=False)
    state = {
        f"model.{name}": torch.from_numpy(np.array(array))
        for name, array in weights.items()
        if "vision" in name
    }
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    rows = {f"rows.{side}": rows_of_timm(model.eval(), shown(1, side))[0] for side in GOLDEN_SIDES}
    found = {name: mx.array(array.numpy()) for name, array in rows.items()}
    mx.save_safetensors(str(GOLDEN), found)


if __name__ == "__main__":
    main()

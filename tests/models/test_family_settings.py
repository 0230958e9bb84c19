"""Settings that a described family does not compute are refused by name, when it is built."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.models.registry import build
from tests.support.families import CONFIGS


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("nemotron_h", {"layers_block_type": None}, "hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, "layers_block_type = 'conv'"),
        ("nemotron_h", {"sliding_window": 64}, "sliding_window = 64"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'"),
        ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias = True"),
        ("mamba2", {"num_heads": 4}, "num_heads"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias = True"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        build(CONFIGS[name] | changes)

"""Keys of KV blocks tell apart everything that shapes the blocks' bytes."""

from __future__ import annotations

from typing import Literal

from quire.core.config import EngineConfig


def test_blocks_computed_with_other_activations_have_other_keys() -> None:
    def root(activation_bits: Literal[8, 16]) -> bytes:
        config = EngineConfig("model", activation_bits=activation_bits)
        names = config.block_names("weights", ())
        return names.root(names.format(None), "")

    assert root(8) != root(16)

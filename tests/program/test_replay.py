"""A program that was traced from a model computes what the model does, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.kv_format import KVFormat
from quire.device.device import open_device
from tests.program.programs import CONFIGS, opened, worst_difference

EVERYDAY = """
    llama gemma4 gemma4_moe gemma4_ple gpt_oss qwen3_5_moe kimi_linear falcon_h1 mamba lfm2
    nemotron_h deepseek_v32 glm_moe_dsa phimoe llama4_text apertus
"""
"""One for each kind of node."""


@pytest.mark.parametrize("name", EVERYDAY.split())
def test_a_program_gives_the_model_s_logits(name: str, tmp_path: Path) -> None:
    open_device("auto")
    assert worst_difference(opened(name, tmp_path)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(EVERYDAY.split())))
def test_every_family_s_program_gives_its_logits(name: str, tmp_path: Path) -> None:
    open_device("auto")
    assert worst_difference(opened(name, tmp_path)) == 0


@pytest.mark.parametrize("name", ["llama", "gemma4_moe"])
def test_a_program_in_bfloat16_gives_the_model_s_logits(name: str, tmp_path: Path) -> None:
    open_device("mlx")
    assert worst_difference(opened(name, tmp_path, "bfloat16")) == 0


def test_a_program_over_packed_blocks_gives_the_model_s_logits(tmp_path: Path) -> None:
    open_device("auto")
    assert worst_difference(opened("llama", tmp_path), format=KVFormat("page", 4, 4)) == 0

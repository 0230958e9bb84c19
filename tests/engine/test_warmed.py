"""The warm-up of an engine runs all that requests need: nothing is compiled later."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = pytest.mark.slow
PACKED = ("gpt_oss_packed", "qwen3_5_moe_packed", "gemma4_ple_packed")


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("llama", "plain"),
        ("llama", "plain 1"),
        pytest.param("llama_of_many_tokens", "plain 256", marks=SLOW),  # a minute
        pytest.param("gpt_oss", "plain 32 again", marks=SLOW),
        pytest.param("gpt_oss", "plain 32", marks=SLOW),
        *(pytest.param(each, "plain", marks=SLOW) for each in PACKED),
        pytest.param("llama", "plain 3", marks=SLOW),
        pytest.param("gemma4_moe", "plain", marks=SLOW),
        pytest.param("gemma4_moe", "page", marks=SLOW),
        pytest.param("llama", "page", marks=SLOW),
        pytest.param("llama", "uniform", marks=SLOW),
        pytest.param("qwen3_moe", "turbo", marks=SLOW),
        pytest.param("qwen3_next", "plain", marks=SLOW),
        pytest.param("mamba2", "plain", marks=SLOW),
        pytest.param("deepseek_v32", "plain", marks=SLOW),
        pytest.param("gpt_oss", "uniform", marks=SLOW),
    ],
)
def test_a_mixed_load_needs_no_kernel_that_the_warm_up_has_not_run(
    family: str, format: str
) -> None:
    command = [sys.executable, "-m", "tests.support.warmed", family, *format.split()]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert not run.stdout, run.stdout

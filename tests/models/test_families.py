"""The described families against Hugging Face transformers: same folder, logits and tokens."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.models.loader import open_model
from tests.models.solo import greedy_choices, solo_logits
from tests.support.families import CONFIGS

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(45)]

SEEDS = {"phi-qk-norm": 3, "starcoder2": 1}  # where the first one's continuation is of few tokens


def _config(name: str) -> Any:
    return AutoConfig.for_model(**deepcopy(CONFIGS[name]))  # which it changes


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens_match(name: str, tmp_path: Path) -> None:
    reference = oracle.save_random(_config(name), tmp_path, seed=SEEDS.get(name, 0))
    model = open_model(str(tmp_path)).model

    difference = solo_logits(model, PROMPT) - oracle.reference_logits(reference, PROMPT)
    expected = oracle.reference_greedy(reference, PROMPT, 40)

    assert mx.max(mx.abs(difference)).item() < 1e-4
    assert len(set(expected)) > 2, "a degenerate continuation proves nothing"
    assert greedy_choices(model, PROMPT, expected) == expected

"""Whose rounding it is: logits with media, and transformers' in float32, against float64."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import picture, solo_logits
from tests.support.seeing import CONFIGS, PROMPTS
from tests.support.tiny_models import gemma4_audio_config, gemma4_config, gemma4_ple_config
from tests.support.tiny_models import prompt_with as gemma4_prompt

pytestmark = [pytest.mark.oracle, pytest.mark.slow]
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402
from tests.models.test_vision_language_oracle import inputs  # noqa: E402

SEEDS = range(4)
BOUND = 1e-4
"""Absolute bound on one logit's error; the largest logits are between 1 and 2."""
GEMMA4 = {
    "gemma4-E2B": gemma4_audio_config(gemma4_ple_config(pad_token_id=3)),
    "gemma4-31B": gemma4_audio_config(gemma4_config(use_bidirectional_attention="vision")),
}
TEXT, SEEN = (PROMPTS[case] for case in ("text alone", "two of different sizes"))


def asked(name: str, loaded: LoadedModel, *, seen: bool) -> tuple[list[int], Any, dict[str, Any]]:
    """Return tokens, their media, and the same as transformers takes it."""
    if not seen:
        return (*TEXT, {})
    if name in GEMMA4:
        tokens, media = gemma4_prompt(picture(6, 8, 48, 12), 2)
        return tokens, media, oracle.media_inputs(tokens, media)
    tokens, media = SEEN
    return tokens, media, inputs(name, loaded, media, tokens)


@pytest.mark.parametrize("seen", [False, True], ids=["text alone", "two pictures"])
@pytest.mark.parametrize("name", CONFIGS | GEMMA4)
def test_rounding_is_that_of_float32(name: str, seen: bool, tmp_path: Path) -> None:
    """Within 1e-4 of float64 where others are, and over draws no further away than transformers."""
    ours, theirs = [], []
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        config = AutoConfig.for_model(**deepcopy((CONFIGS | GEMMA4)[name]))
        reference = oracle.save_random(config, folder, seed)
        loaded = open_model(str(folder))
        tokens, media, given = asked(name, loaded, seen=seen)
        exact = oracle.float64_logits(reference, tokens, **given)
        with torch.no_grad():
            narrow = reference(torch.tensor([tokens]), use_cache=False, **given).logits[0]
        ours.append(np.abs(np.array(solo_logits(loaded.model, tokens, media)) - exact).max())
        theirs.append(np.abs(narrow.numpy() - exact).max())
    assert max(ours[0], theirs[0]) < BOUND  # the draw of the other tests
    assert np.median(ours) < 2 * np.median(theirs)

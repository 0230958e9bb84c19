"""lm-evaluation-harness's `local-completions` against a real server, and against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from quire.demo import MODEL_DIR
from tests.support.child import Child

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a banana"),
    ("1 2 3 4", " 5 6"),
]


@pytest.mark.oracle
def test_its_figures_are_those_with_transformers(child: Child) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    def asked(kind: str, *arguments: Any) -> list[Any]:
        return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]

    ours = LocalCompletionsAPI(
        base_url=f"{child.url}/v1/completions",
        model="quire-demo",
        tokenizer_backend="huggingface",
        tokenizer=str(MODEL_DIR),
        batch_size=2,
    )
    theirs = HFLM(pretrained=str(MODEL_DIR), dtype="float32", device="cpu")
    found = ours.loglikelihood(asked("loglikelihood", *PAIRS))
    wanted = theirs.loglikelihood(asked("loglikelihood", *PAIRS))
    for (one, greedy), (other, best) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-3)
        assert greedy == best
    until = ("1 2 3", {"until": ["\n"], "max_gen_toks": 8, "temperature": 0})
    (text,) = ours.generate_until(asked("generate_until", until))
    assert text

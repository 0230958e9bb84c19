"""Encoders of text against transformers: many texts in one step, and classification heads."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quire.core.config import EngineConfig
from quire.core.request import Classify, Embed, FinishReason, Request, Task
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.encoders import CONFIGS
from tests.support.everyday import everyday
from tests.support.parity import Company, prompts

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")

from tests.models import oracle  # noqa: E402

LENGTHS = (1, 2, 33, 7, 64, 65, 96, 33)
"""Numbers of tokens: within and beyond windows, some equal, up to the whole context."""
HEADS = [name for name in CONFIGS if "rerank" in name]
DAILY = (
    "bert-rerank",
    "gemma3_text-bidirectional",
    "modernbert",
    "modernbert-rerank",
    "xlm-roberta",
)
Floats = npt.NDArray[np.float32]


def saved(name: str, folder: Path) -> Any:
    """Write a model of random weights; return transformers' model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**deepcopy(CONFIGS[name]))
    kind = "AutoModelForSequenceClassification" if name in HEADS else "AutoModel"
    model = getattr(transformers, kind).from_config(config, attn_implementation="eager")
    oracle.draw_anew(model)
    model.save_pretrained(folder)
    return model.eval()


def texts(loaded: LoadedModel, task: Task) -> list[Request]:
    """Return requests of each length; of models that tell texts apart, pairs."""
    made = []
    for request in prompts(LENGTHS):
        tokens = tuple(4 + token % 190 for token in request.prompt)
        kinds = tuple(int(3 * n > len(tokens)) for n in range(len(tokens)))
        types = kinds if loaded.model.token_types else ()
        made.append(replace(request, prompt=tokens, token_types=types, task=task))
    return made


def vectors(company: Company, wanted: list[Request]) -> list[Floats]:
    company.run(wanted)
    found = []
    for request in wanted:
        (end,) = company.answers[request.id].ends
        assert end.finish is FinishReason.STOP, end.error
        assert end.vector is not None
        found.append(np.array(end.vector, np.float32))
    return found


def theirs(model: Any, request: Request) -> Any:
    given = {"input_ids": torch.tensor([request.prompt])}
    if request.token_types:
        given["token_type_ids"] = torch.tensor([request.token_types])
    with torch.no_grad():
        return model(**given)


@pytest.mark.parametrize("name", everyday(CONFIGS, lambda name: name in DAILY))
def test_many_texts_in_one_step(tmp_path: Path, name: str) -> None:
    model, loaded = saved(name, tmp_path), open_model(str(tmp_path), dtype="float32")
    company = Company(loaded, EngineConfig("", kv_memory=1 << 20))
    company.engine.step_times.reading.observe(512, 0.001)  # so steps may have that many rows
    poolings = ("classify",) if name in HEADS else ("mean", "cls", "last", "max")
    for pooling in poolings:
        task = Classify() if pooling == "classify" else Embed(pooling, normalized=False)
        wanted = [replace(each, id=f"{pooling} {each.id}") for each in texts(loaded, task)]
        steps = company.engine.stats().steps
        found = vectors(company, wanted)
        assert company.engine.stats().steps == steps + 1
        for request, vector in zip(wanted, found, strict=True):
            answer = theirs(model, request)
            if pooling == "classify":
                want = answer.logits[0].numpy()
            else:
                rows = answer.last_hidden_state[0].numpy()
                first, last, mean, greatest = rows[0], rows[-1], rows.mean(axis=0), rows.max(axis=0)
                want = {"cls": first, "last": last, "mean": mean, "max": greatest}[pooling]
            assert np.abs(vector - want).max() < 1e-4 * max(1, np.abs(want).max())
    stats = company.engine.stats()
    assert stats.cached_tokens == stats.generated_tokens == 0
    assert sum(used for _, used in stats.kv_used) == 0

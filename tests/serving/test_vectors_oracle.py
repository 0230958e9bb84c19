"""Embeddings and reranking in Qwen3's layouts, held against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import AsyncLLM
from quire.core.errors import NotOffered
from quire.demo import MODEL_DIR
from quire.serving.ranking import prepare_ranking, ranked

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

IDS = [[5, 6, 7, 8], [9, 10], list(range(20, 90))]


def saved(folder: Path, kind: str) -> Any:
    """Write a small Qwen3 of random weights with the embedded model's tokenizer; return it."""
    torch.manual_seed(0)
    tokenizer = json.loads((MODEL_DIR / "config.json").read_text())
    vocabulary = tokenizer.get("text_config", tokenizer)["vocab_size"]
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["architectures"] = ["Qwen3ForCausalLM"]  # as in both checkpoints of Qwen3-Embedding
    (folder / "config.json").write_text(json.dumps(written))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (MODEL_DIR / name).exists():
            shutil.copy(MODEL_DIR / name, folder / name)
    return model


def pooled(folder: Path, **mode: bool) -> None:
    """Write what sentence-transformers writes."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {"idx": 2, "name": "2", "path": "2_N", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, **mode})
    )
    prompts = {"prompts": {"query": "Query:", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


@pytest.mark.parametrize("mode", ["pooling_mode_lasttoken", "pooling_mode_mean_tokens"])
async def test_embeddings_are_those_of_transformers(tmp_path: Path, mode: str) -> None:
    model = saved(tmp_path, "Qwen3Model")  # whose tensors have no prefix
    pooled(tmp_path, **{mode: True, "include_prompt": True})
    async with AsyncLLM(tmp_path, dtype="float32") as llm:
        vectors = await llm.embed(IDS)
        named = await llm.embed(["x"], prompt_name="query")
        assert named == await llm.embed(["Query:x"])
        cosines = await llm.score("a", ["a", "b"])
        assert cosines[1].score < 1
    for ids, vector in zip(IDS, vectors, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        want = hidden[-1] if mode.endswith("lasttoken") else hidden.mean(axis=0)
        assert np.abs(np.array(vector.values) - want / np.linalg.norm(want)).max() < 1e-4


async def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    model = saved(tmp_path, "Qwen3ForCausalLM")
    async with AsyncLLM(tmp_path, dtype="float32") as llm:
        service = llm._opened.service
        pairs = [("cats", "a cat sleeps"), ("cats", "the sky is blue")]
        ranking = await prepare_ranking(service, pairs)
        scores = (await ranked(service, ranking)).scores
        labels = [service.tokenizer.encode(w, add_special_tokens=False)[0] for w in ("yes", "no")]
    for prompt, score in zip(ranking.prepared.prompts, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt.tokens])).logits[0, -1, labels]
        assert score == pytest.approx(float(torch.softmax(logits, 0)[0]), abs=1e-4)


async def test_a_pooling_that_is_not_supported_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "Qwen3Model")
    pooled(tmp_path, pooling_mode_weightedmean_tokens=True)
    async with AsyncLLM(tmp_path) as llm:
        with pytest.raises(NotOffered, match="pooling_mode_weightedmean_tokens"):
            await llm.embed("x")
        assert await llm.embed("x", pooling="mean")

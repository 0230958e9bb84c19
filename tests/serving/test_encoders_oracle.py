"""Texts through encoders, from tokenizer to vector or score, against transformers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import AsyncLLM
from quire.core.errors import RequestError
from quire.serving.generation import Generation
from tests.support.encoders import write_modules, write_tokenizer

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
pytestmark = pytest.mark.oracle

from safetensors.torch import save_file  # noqa: E402

from tests.models.test_text_encoders_oracle import saved  # noqa: E402

TEXTS = ["the cat sleeps", "a dog runs where the sky is blue", "who"]


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(folder, dtype="float32", kv_memory=1 << 20) as llm:
        yield llm


def write_dense(folder: Path, name: str, inputs: int, outputs: int, activation: str) -> Any:
    """Write a linear layer as sentence-transformers does; return its function."""
    layer = torch.nn.Linear(inputs, outputs, bias=activation.endswith("Tanh"))
    (folder / name).mkdir()
    save_file({f"linear.{k}": v for k, v in layer.state_dict().items()}, _weights(folder, name))
    settings = {
        "in_features": inputs,
        "out_features": outputs,
        "bias": layer.bias is not None,
        "activation_function": f"torch.nn.modules.{activation}",
    }
    (folder / name / "config.json").write_text(json.dumps(settings))
    return lambda x: torch.tanh(layer(x)) if layer.bias is not None else layer(x)


def _weights(folder: Path, name: str) -> str:
    return str(folder / name / "model.safetensors")


async def test_prompts_pooling_and_linear_layers_of_embeddinggemma(tmp_path: Path) -> None:
    model = saved("gemma3_text-bidirectional", tmp_path)
    write_tokenizer(tmp_path)
    write_modules(tmp_path, "mean", ("2_Dense", "3_Dense"))
    wide = write_dense(tmp_path, "2_Dense", 64, 96, "linear.Identity")
    narrow = write_dense(tmp_path, "3_Dense", 96, 48, "activation.Tanh")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    def want(text: str) -> Any:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
            return torch.nn.functional.normalize(narrow(wide(hidden.mean(0))), dim=0).numpy()

    async with opened(tmp_path) as llm:
        found = await llm.embed(TEXTS)
        asked = await llm.embed(TEXTS[0], prompt_name="query")
        ranked = await llm.score(TEXTS[0], TEXTS)
        with pytest.raises(RequestError, match="is an encoder: it embeds and scores texts"):
            await llm.generate("the cat")
    for text, vector in zip(TEXTS, found, strict=True):
        assert np.abs(np.array(vector.values) - want(text)).max() < 1e-4
    query = want("query " + TEXTS[0])
    assert np.abs(np.array(asked[0].values) - query).max() < 1e-4
    cosines = [float(query @ want("document " + text)) for text in TEXTS]
    assert [each.score for each in ranked] == pytest.approx(cosines, abs=1e-4)


async def test_a_reranker_reads_pairs(tmp_path: Path) -> None:
    model = saved("bert-rerank", tmp_path)
    write_tokenizer(tmp_path, typed=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    def want(document: str, **cut: Any) -> float:
        encoded = tokenizer(TEXTS[0], document, return_tensors="pt", **cut)
        assert encoded["token_type_ids"].any()
        with torch.no_grad():
            return float(torch.sigmoid(model(**encoded).logits[0, 0]))

    long = "sky " * 120
    async with opened(tmp_path) as llm:
        found = await llm.score(TEXTS[0], TEXTS)
        for count in range(1, 9):  # steps of each size are whole
            assert len(await llm.score("the cat", ["a dog"] * count)) == count
        with pytest.raises(RequestError, match=r"126 tokens; .* at most 96 \(its context\)"):
            await llm.score(TEXTS[0], [long])
        service = llm._opened.service
        for most in (4, 9, 96):
            encoded = service.tokenizer.encode_texts(TEXTS[0], long, most=most)
            whole = tokenizer(TEXTS[0], long, truncation=True, max_length=most)
            assert list(encoded.ids) == whole["input_ids"]
            assert list(encoded.types) == whole["token_type_ids"]
    assert [each.score for each in found] == pytest.approx(list(map(want, TEXTS)), abs=1e-4)


async def test_texts_are_cut_to_what_the_files_allow(tmp_path: Path) -> None:
    saved("xlm-roberta", tmp_path)
    write_tokenizer(tmp_path)
    write_modules(tmp_path, "cls", max_tokens=8)
    async with opened(tmp_path) as llm:
        with pytest.raises(RequestError, match=r"at most 8 \(max_seq_length of its sentence_bert"):
            await llm.embed("cat " * 7)
        service = llm._opened.service
        spec = Generation(prompts=("cat " * 7 + "dog",), vector=True, max_prompt=8, truncate=-1)
        (prompt,) = (await service.prepare(spec)).prompts
        cat, dog = (service.tokenizer.token_id(each) for each in ("cat", "dog"))
        assert prompt.tokens == (2, *6 * [cat], 3)
        spec = Generation(prompts=("cat dog",), vector=True, truncate=3, truncate_left=True)
        (prompt,) = (await service.prepare(spec)).prompts
        assert prompt.tokens == (2, dog, 3)
        (vector,) = await llm.embed("cat " * 6)
        assert np.linalg.norm(vector.values) == pytest.approx(1, abs=1e-5)

"""A tokenizer in another process: equal to one here, closed whole, and its death is heard of."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from quire.core.errors import EngineFailure, ModelError
from quire.demo import MODEL_DIR
from quire.serving.tokenizer_process import TokenizerProcess
from quire.text.controls import Controls, control_tokens
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer
from tests.text import made

TEXTS = ("Hello there.", "", "naïve 日本語 🙂", "<bos><|turn>user\n", "a \ud800 b", "  \n\t x" * 50)


@asynccontextmanager
async def apart(
    folder: Path, ended: list[str] | None = None
) -> AsyncIterator[tuple[TokenizerProcess, psutil.Process]]:
    before = set(psutil.Process().children())
    process = await TokenizerProcess.start(folder, [].append if ended is None else ended.append)
    (child,) = set(psutil.Process().children()) - before
    try:
        yield process, child
    finally:
        await process.close()
        await process.close()
        assert not child.is_running()


def shown(tokenizer: Tokenizer) -> list[object]:
    """Return what a server makes of a tokenizer."""
    controls = Controls(tokenizer, control_tokens(tokenizer, "<|turn>"))
    found: list[object] = [tokenizer.special_tokens, tokenizer.added_tokens, tokenizer.eos_ids]
    found += [tokenizer.vocab_size, tokenizer.special_ids]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer)
        found += [ids, tokenizer.encode(text, add_special_tokens=False)]
        found += [tokenizer.decode(ids), "".join(map(detokenizer.add, ids)) + detokenizer.flush()]
        found.append(controls.encode(f"<|turn>{controls.cover(text)}"))
    ids = [*range(0, tokenizer.vocab_size, 97), tokenizer.vocab_size]
    found += [tokenizer.token_text(each) for each in ids]
    found += [tokenizer.token_bytes(each) for each in ids[:-1]]
    return found


@pytest.mark.parametrize("kind", ["embedded", "word_piece"])
async def test_all_is_as_of_a_tokenizer_in_this_process(tmp_path: Path, kind: str) -> None:
    """WordPiece's decoder looks at neighbours, so each token is decoded there."""
    if kind != "embedded":
        made.made(kind).save(str(tmp_path / "tokenizer.json"))
    folder = MODEL_DIR if kind == "embedded" else tmp_path
    async with apart(folder) as (process, _):
        there = await asyncio.to_thread(shown, process.tokenizer)
    assert there == shown(Tokenizer.open(folder))


async def test_its_death_is_an_engine_failure_and_told() -> None:
    ended: list[str] = []
    async with apart(MODEL_DIR, ended) as (process, child):
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(EngineFailure, match="tokenizer ended or does not answer; try again"):
            process.tokenizer.encode("Hello")
        await asyncio.sleep(0)
        assert ended == ["the process that holds the tokenizer ended or does not answer"]


async def test_a_folder_without_a_tokenizer_is_refused_and_no_process_stays(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        await TokenizerProcess.start(tmp_path, lambda _: None)
    assert psutil.Process().children() == before

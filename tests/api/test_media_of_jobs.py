"""Media that a job has read, on its way to the engine."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import PIL.Image
from starlette.requests import Request

from quire.api.reading import ReadingContext
from quire.api.responses.store import ResponseStore
from quire.api.shared.context import Context
from quire.api.shared.entries import Entries
from quire.api.shared.signing import Signer
from quire.core.config import ServerConfig
from quire.core.info import ModelInfo
from quire.core.lru import LruCache
from quire.demo import MODEL_DIR
from quire.media.source import MediaSource
from quire.serving.assembly import assemble
from quire.serving.generation import Generation, Prepared
from quire.serving.job_messages import JobLimits
from quire.serving.jobs import Jobs
from quire.text.tokenizer import Tokenizer
from tests.support.scripted_engine import Script, ScriptedEngine


async def show(context: Context, request: Request, body: bytes) -> Prepared:
    """Read a request whose body is a picture."""
    url = "data:image/png;base64," + base64.b64encode(body).decode()
    parts = [{"type": "image", "source": MediaSource(url, "x", "x")}]
    return await context.prepare(Generation(messages=({"role": "user", "content": parts},)))


def picture() -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (64, 64), "red").save(file, "PNG")
    return file.getvalue()


async def staying() -> Any:
    """Receive nothing: the client stays connected."""
    await asyncio.Event().wait()


async def test_the_engine_gets_media_that_a_job_read() -> None:
    """A file that is too large to be kept for the next request reaches the engine, too."""
    size = Tokenizer.open(MODEL_DIR).vocab_size
    info = ModelInfo(
        *(str(MODEL_DIR), "gemma4", size, 256, "float32", "cpu", 1 << 20),
        modalities=("text", "image"),
    )
    engine, config = ScriptedEngine(info, lambda _: Script((5,))), ServerConfig()
    service = assemble(engine, "demo", config)
    media, store, signer = (
        service.prompts.media,
        ResponseStore(Entries(1, 1)),
        Signer(config.signing_key),
    )
    jobs = Jobs(ReadingContext(info, "demo", config), JobLimits(at_once=1))
    processor = media._processors["image"]
    item = processor.read(picture(), param="x")[0].item
    try:
        for kept in (0, len(item.features)):
            processor.files = LruCache(kept, lambda parts: len(parts[0].item.features))
            for _ in range(2):  # the second time it is found, if it is kept
                request = Request(
                    {"type": "http", "method": "POST", "path": "/", "headers": []}, staying
                )
                context = Context(service, config, signer, lambda _: store, media.for_job(), jobs)
                await context.start(request, await context.read(request, picture(), show))
    finally:
        await jobs.close()
        await service.close()
    assert [sent.media[0].item for sent in engine.requests] == [item] * 4

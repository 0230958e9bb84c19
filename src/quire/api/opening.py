"""Turns the client of an opened engine into a model that answers requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire.api.reading import ReadingContext
from quire.core.config import ModelConfig, ServerConfig
from quire.core.errors import ModelError, QuireError
from quire.media.kinds import inputs, limits_of
from quire.serving.assembly import assemble
from quire.serving.interface import EngineClient
from quire.serving.job_messages import JobLimits
from quire.serving.job_starts import JobProcess
from quire.serving.jobs import Jobs
from quire.serving.model import Loaded
from quire.serving.model_files import stamp_of
from quire.serving.tasks import close_all
from quire.serving.tokenizer_process import TokenizerProcess

log = logging.getLogger("quire.server")


async def open_service(
    client: EngineClient,
    model_config: ModelConfig,
    broken: asyncio.Event | None = None,
    *,
    tokenizer_apart: Callable[[str], None] | None = None,
    job_process: JobProcess | None = None,
) -> Loaded:
    """Assemble a model's service and start the process of its jobs. Close the client on failure.

    The first job waits until its process has started.

    Args:
        client: client of an engine whose model is open. The result owns it.
        broken: event to set when the engine cannot continue; None if that cannot happen.
        tokenizer_apart: open the tokenizer in a process of its own, and call this with the reason
            if that process ends; None opens it in this process.
        job_process: the process of its jobs, if it was started already.

    Raises:
        ModelError: a file of the model cannot be used.
    """
    config = model_config.serving
    tokenizer: TokenizerProcess | None = None
    try:
        if tokenizer_apart is not None:
            tokenizer = await TokenizerProcess.start(Path(client.info.path), tokenizer_apart)
        known = None if tokenizer is None else tokenizer.tokenizer
        service = await asyncio.to_thread(assemble, client, model_config.name, config, known)
    except BaseException as error:
        await close_all(*(each.close() for each in (client, tokenizer) if each is not None))
        if isinstance(error, QuireError) or not isinstance(error, Exception):
            raise
        log.exception("the files of %s cannot be read", model_config.name)
        why = f"a file cannot be understood ({type(error).__name__}: {error})"
        raise ModelError(f"{client.info.path}: {why}") from error
    stamp = stamp_of(Path(client.info.path))
    reading = ReadingContext(client.info, model_config.name, config, stamp=stamp)
    jobs = Jobs(
        reading,
        _job_limits(config),
        config.log_level,
        log_format=config.log_format,
        process=job_process,
    )
    jobs.open_soon()
    return Loaded(service, jobs, broken=broken, tokenizer=tokenizer)


def _job_limits(config: ServerConfig) -> JobLimits:
    """Return limits large enough for the largest allowed file in all its decoded forms."""
    limits = JobLimits()
    media = limits_of(config.media_limits)
    working = max(each.working_bytes(media[kind].each) for kind, each in inputs().items())
    return replace(limits, memory=limits.memory + working)

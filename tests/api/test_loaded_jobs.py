"""Jobs find loaded what they read requests with."""

from __future__ import annotations

import sys

from quire.api.reading import ReadingContext
from quire.api.shared.context import Context
from quire.core.config import ServerConfig
from quire.core.info import ModelInfo
from quire.demo import MODEL_DIR
from quire.serving.job_messages import JobLimits
from quire.serving.jobs import Jobs
from quire.text.tokenizer import Tokenizer


async def left_to_load(context: Context) -> list[str]:
    """Return which modules of endpoints, and which schemas, a job would load by itself."""
    before = set(sys.modules)
    from quire.api.routes import OPERATIONS

    bodies = [each.body for each in OPERATIONS if each.body is not None]
    unbuilt = [each.__name__ for each in bodies if not each.__pydantic_complete__]
    return [*sorted(set(sys.modules) - before), *unbuilt]


async def test_a_job_loads_neither_endpoints_nor_schemas() -> None:
    size = Tokenizer.open(MODEL_DIR).vocab_size
    info = ModelInfo(str(MODEL_DIR), "gemma4", size, 256, "float32", "cpu", 1 << 20)
    jobs = Jobs(ReadingContext(info, "demo", ServerConfig()), JobLimits(at_once=1))
    try:
        assert await jobs.run(left_to_load) == []
    finally:
        await jobs.close()

"""Quire as a Python library: models and the engine of `quire serve`, without a server."""

from quire.llm.answers import Answer, Embedding, Score
from quire.llm.async_llm import AsyncLLM, AsyncStream
from quire.llm.options import ChatOptions, Options
from quire.llm.settings import Settings
from quire.llm.sync_llm import LLM, Stream

__all__ = [
    "LLM",
    "Answer",
    "AsyncLLM",
    "AsyncStream",
    "ChatOptions",
    "Embedding",
    "Options",
    "Score",
    "Settings",
    "Stream",
]

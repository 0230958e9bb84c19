"""Opens the processes that read requests outside the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from quire.api.responses.stored_item import StoredItem
from quire.api.routes import OPERATIONS
from quire.api.shared.context import Context
from quire.api.shared.signing import Signer
from quire.core.config import ServerConfig
from quire.core.info import EngineStats, ModelInfo
from quire.core.messages import ToEngine
from quire.core.request import Request
from quire.media.parts import FileKey, Parts
from quire.serving.assembly import assemble
from quire.serving.job_messages import Asker
from quire.serving.model_files import Stamp, check_unchanged
from quire.serving.ticket import Ticket

_DECODERS = ("av", "pypdfium2")
"""Modules of decoders in the `[media]` extra. Loading them takes 0.2 s."""


@dataclass(frozen=True, slots=True)
class ReadingContext:
    """Creates the context of readers in jobs; `Jobs` opens it.

    Attributes:
        name: the model's served name.
        config: the server's settings, with its signing key.
        stamp: stamp of the model's files when the server read them; None skips the comparison.
    """

    info: ModelInfo
    name: str
    config: ServerConfig
    stamp: Stamp | None = None

    def __call__(self, ask: Asker) -> Context:
        check_unchanged(Path(self.info.path), self.stamp)
        service = assemble(_NoEngine(self.info), self.name, self.config)
        service.prompts.media.share(_ServersFiles(ask))
        _load()
        signer = Signer(self.config.signing_key)
        stored, media = _ServersStore(ask), service.prompts.media.for_job()
        return Context(service, self.config, signer, stored=lambda _: stored, job_media=media)


def _load() -> None:
    """Load decoders and build the schemas of requests, here once, else each job would anew."""
    for decoder in _DECODERS:
        if find_spec(decoder) is not None:
            import_module(decoder)
    for each in OPERATIONS:
        if each.body is not None:
            each.body.model_rebuild()


class _NoEngine:
    """An engine client without an engine: readers only need the model's description."""

    failure = None

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    def submit(self, requests: Sequence[Request]) -> Sequence[Ticket]:
        self._refuse()

    async def stats(self) -> EngineStats:
        self._refuse()

    async def ask(self, question: Callable[[int], ToEngine]) -> Any:
        self._refuse()

    async def close(self) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("a job has no engine")


class _ServersStore:
    """Responses stored by the server; implements `shared.stored.StoredConversations`."""

    def __init__(self, ask: Asker) -> None:
        self._ask = ask

    def history(self, response_id: str) -> Sequence[StoredItem] | None:
        items: Sequence[StoredItem] | None = self._ask("history", response_id)
        return items

    def conversation(self, conversation_id: str) -> Sequence[StoredItem] | None:
        items: Sequence[StoredItem] | None = self._ask("conversation", conversation_id)
        return items

    def item(self, item_id: str) -> StoredItem | None:
        item: StoredItem | None = self._ask("stored_item", item_id)
        return item


class _ServersFiles:
    """Media stored by the server, without features; see `JobMedia.answers`."""

    def __init__(self, ask: Asker) -> None:
        self._ask = ask

    def get(self, key: FileKey) -> Parts | None:
        parts: Parts | None = self._ask("file", key)
        return parts

    def put(self, key: FileKey, value: Parts) -> Parts:
        parts: Parts = self._ask("keep", key, value)
        return parts

"""Answers batches in the background, by calling the application itself at the lowest priority."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from quire.api.batches.lines import Answers, BadLine, BatchRequest, requests_in
from quire.api.batches.sending import answer_request
from quire.api.batches.store import BatchRecord, CallerFiles, FileStore
from quire.api.shared.auth import as_caller
from quire.api.shared.priority import PRIORITY_HEADER
from quire.serving.tasks import cancel_and_wait, first_error

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("quire.batches")

MOST_REQUESTS = 50_000
_ANSWERS = ".answers"


class BatchRunner:
    """Runs the batches of all API keys. At the server's start it continues unfinished batches.

    Args:
        at_once: the most requests in flight, of all batches together.
    """

    def __init__(self, store: FileStore, at_once: int) -> None:
        self._store = store
        self._free = asyncio.Semaphore(at_once)
        self._app: ASGIApp | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, app: ASGIApp) -> None:
        """Start answering batches by requests to `app`."""
        self._app = app
        for caller, files in self._store.all():
            for batch in reversed(list(files.batches)):
                if not batch.over:
                    self.run(caller, batch)

    async def close(self) -> None:
        """Stop. Answers so far are kept."""
        await cancel_and_wait(*self._tasks.values())
        self._store.close()

    def run(self, caller: str, batch: BatchRecord) -> None:
        """Answer a batch in the background."""
        task = asyncio.create_task(self._run(caller, batch.id))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def cancel(self, caller: str, batch_id: str) -> BatchRecord:
        """Stop a batch, unless it is over. Answers so far are kept; requests in flight are
        aborted.
        """
        files = self._store.of(caller)
        batch = files.batches.get(batch_id, "batch")
        if not batch.over and batch.status != "cancelling":
            files.batches.put(batch.becomes("cancelling"))
            if task := self._tasks.get(batch_id):
                await cancel_and_wait(task)
            self.run(caller, batch)
        return files.batches.get(batch_id, "batch")

    async def _run(self, caller: str, batch_id: str) -> None:
        files = self._store.of(caller)
        try:
            await self._answer(caller, files, batch_id)
        except Exception as error:  # whatever went wrong, the batch has an end
            log.exception("batch %s failed", batch_id)
            first = first_error(error)
            reason = (isinstance(first, OSError) and first.strerror) or str(first)
            batch = files.batches.get(batch_id, "batch")
            batch = batch.becomes("failed", errors=[_error("batch_failed", reason)])
            files.batches.note(batch)
            with suppress(OSError):  # on a full disk it is forgotten, and the next start goes on
                files.batches.put(batch)

    async def _answer(self, caller: str, files: CallerFiles, batch_id: str) -> None:
        """Run a batch from whatever status it has to its end."""
        batch = files.batches.get(batch_id, "batch")
        if batch.status == "validating":
            batch = await asyncio.to_thread(_checked, files, batch)
            files.batches.put(batch)
            if batch.over:
                return
        with Answers(files.batches.path(batch.id, _ANSWERS)) as answers:
            await asyncio.to_thread(lambda: answers.done)  # reads a file that may be large
            failed = sum(status != 200 for status in answers.done.values())
            files.batches.note(replace(batch, succeeded=len(answers.done) - failed, failed=failed))
            if batch.status == "in_progress":
                with suppress(TimeoutError):
                    async with asyncio.timeout(batch.expires_at - time.time()):
                        await self._send(caller, files, batch, answers=answers)
        batch = files.batches.get(batch_id, "batch")
        if batch.status == "in_progress":
            batch = batch.becomes("finalizing")
            files.batches.put(batch)
        files.batches.put(await asyncio.to_thread(_finished, files, batch))

    async def _send(
        self, caller: str, files: CallerFiles, batch: BatchRecord, answers: Answers
    ) -> None:
        """Send each request that has no answer yet, and write the answers."""
        import httpx  # imports 90 modules, and few servers have batches

        assert self._app is not None, "the runner has not started"
        transport = httpx.ASGITransport(as_caller(self._app, caller), raise_app_exceptions=False)
        async with (
            httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers={PRIORITY_HEADER: "1"}
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            async for request in self._left(files, batch, answers):
                group.create_task(
                    self._one(client, files, batch.id, request=request, answers=answers)
                )

    async def _left(
        self, files: CallerFiles, batch: BatchRecord, answers: Answers
    ) -> AsyncIterator[BatchRequest]:
        """Yield the requests without an answer, each when another may be in flight."""
        requests = requests_in(files.files.path(batch.input_file_id))
        left = (each for each in requests if each.custom_id not in answers.done)
        # In a thread: the next request may stand behind thousands that have an answer.
        while (request := await asyncio.to_thread(next, left, None)) is not None:
            await self._free.acquire()
            yield request

    async def _one(
        self,
        client: httpx.AsyncClient,
        files: CallerFiles,
        batch_id: str,
        request: BatchRequest,
        answers: Answers,
    ) -> None:
        try:
            good = await answer_request(client, request, answers)
            batch = files.batches.get(batch_id, "batch")
            files.batches.note(
                replace(batch, succeeded=batch.succeeded + good, failed=batch.failed + (not good))
            )
        finally:
            self._free.release()


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": None}


def _checked(files: CallerFiles, batch: BatchRecord) -> BatchRecord:
    """Return the batch with its number of requests, or as failed if a line is not a request."""
    path, total = files.files.path(batch.input_file_id), 0
    try:
        for _ in requests_in(path, batch.endpoint):
            total += 1
            if total > MOST_REQUESTS:
                raise BadLine(path.name, total, f"a batch has at most {MOST_REQUESTS} requests")
        if not total:
            raise BadLine(path.name, 0, "the file has no requests")
    except BadLine as error:
        return batch.becomes("failed", errors=[_error("invalid_line", error.what, error.line)])
    return batch.becomes("in_progress", total=total)


def answer_lines(files: CallerFiles, batch: BatchRecord) -> Iterator[dict[str, Any]]:
    """Yield the answers of a batch, in order of completion."""
    path = files.batches.path(batch.id, _ANSWERS)
    if path.exists():
        with path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield json.loads(line)


def unanswered(files: CallerFiles, batch: BatchRecord) -> Iterator[str]:
    """Yield the custom_ids of requests without an answer in a finished batch."""
    answered = {line["custom_id"] for line in answer_lines(files, batch)}
    path = files.files.path(batch.input_file_id)
    for request in requests_in(path) if path.exists() else ():  # its owner may have deleted it
        if request.custom_id not in answered:
            yield request.custom_id


def _finished(files: CallerFiles, batch: BatchRecord) -> BatchRecord:
    """Return the finished batch, with the files that OpenAI's clients fetch.

    Their ids are derived from the batch's, so repeating it leaves no extra files.
    """
    statuses = [line["response"]["status_code"] for line in answer_lines(files, batch)]
    good = statuses.count(200)
    cancelled = batch.status == "cancelling"
    expired = not cancelled and len(statuses) < batch.total
    kept_s = batch.output_expires_s
    expires_at = None if kept_s is None else int(time.time()) + kept_s
    changes: dict[str, Any] = {"succeeded": good, "failed": len(statuses) - good}
    if batch.id.startswith("batch_"):  # Anthropic's results are read from the answers
        digits = batch.id.removeprefix("batch_")[1:]
        written = {"output": good, "error": expired or len(statuses) - good}
        for number, name in enumerate(name for name, wanted in written.items() if wanted):
            lines = _error_lines(files, batch, expired=expired)
            if name == "output":
                lines = _answered(files, batch, good=True)
            file_id = f"file-{number}{digits}"
            contents = (json.dumps(line).encode() + b"\n" for line in lines)
            filename = f"{batch.id}_{name}.jsonl"
            files.add_file(
                contents, filename, "batch_output", file_id=file_id, expires_at=expires_at
            )
            changes[f"{name}_file_id"] = file_id
    if cancelled:
        return batch.becomes("cancelled", **changes)
    return batch.becomes("expired" if expired else "completed", **changes)


def _answered(files: CallerFiles, batch: BatchRecord, *, good: bool) -> Iterator[dict[str, Any]]:
    for line in answer_lines(files, batch):
        if (line["response"]["status_code"] == 200) is good:
            yield line


def _error_lines(
    files: CallerFiles, batch: BatchRecord, *, expired: bool
) -> Iterator[dict[str, Any]]:
    yield from _answered(files, batch, good=False)
    if expired:
        message = "This request was not answered before the batch expired."
        for custom_id in unanswered(files, batch):
            line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
            yield {**line, "response": None, "error": {"code": "batch_expired", "message": message}}

"""`quire batch`: answers a file of requests, and continues where an earlier run ended."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import httpx
from pydantic import Field
from rich.console import Console

from quire.api.batches.lines import Answers, BatchRequest, requests_in
from quire.api.batches.sending import answer_request
from quire.api.shared.priority import PRIORITY_HEADER
from quire.cli.keys import ClientOptions
from quire.cli.load import unreachable
from quire.cli.own_server import loading_server
from quire.cli.progress import shown, silent
from quire.cli.settings import Command, said
from quire.cli.values import Count, File, Flag, Place
from quire.core.errors import QuireError
from quire.serving.tasks import first_error

_TRIES = 8


class BatchCommand(ClientOptions, Command):
    """Answers the requests of a file in OpenAI's batch format, by the server at --url, or by a
    model that it serves itself (--model). Run again after a crash, it answers what is missing.
    """

    command: ClassVar[str] = "batch"
    summary: ClassVar[str] = "answer the requests of a file"
    alternatives: ClassVar[tuple[str, ...]] = ("url", "model")

    input: Annotated[File, Flag(positional=True)] = Field(
        description="input file: JSON Lines, a request a line"
    )
    output: Annotated[File, Flag(positional=True)] = Field(
        description="output file: JSON Lines, an answer a line"
    )
    model: Annotated[Place | None, Flag(bare="")] = Field(
        None,
        description="instead of --url: start a server with this folder or hub id for this batch; "
        "without a value the embedded model",
    )
    concurrency: Count = Field(128, description="requests in flight")

    def run(self) -> int:
        """Answer the requests without an answer. Return 1 if one failed, 2 if none could be
        sent.
        """
        console = Console(stderr=True)
        try:
            requests = list(requests_in(self.input))
            with Answers(self.output) as answers, contextlib.ExitStack() as stack:
                left = [each for each in requests if each.custom_id not in answers.done]
                url, key = self._server(stack, console) if left else ("", None)
                start = stack.enter_context(shown(console)) if left else silent
                done = start("answering requests", len(left))
                run = _Run(url, key, answers=answers, done=done)
                failed = asyncio.run(run.answer(left, self.concurrency))
        except (QuireError, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            unanswered = isinstance(error, httpx.TransportError)
            what = unreachable(url, error) if unanswered else said(error)
            print(f"quire batch: {what}", file=sys.stderr)
            return 2
        before = len(requests) - len(left)
        told = f"{len(left)} answered, {failed} of them with an error; {before} were already there"
        print(f"quire batch: {told}", file=sys.stderr)
        return 1 if failed else 0

    def _server(self, stack: contextlib.ExitStack, console: Console) -> tuple[str, str | None]:
        """Return URL and key of the server. A server started here ends with the stack."""
        if self.model is None:
            return self.url, self.key
        return stack.enter_context(loading_server(self.model, adapter=None, console=console)), None


class _Run:
    """Sends requests and writes their answers."""

    def __init__(self, url: str, key: str | None, answers: Answers, done: Any) -> None:
        self._url = url
        self._headers = {PRIORITY_HEADER: "1"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._answers = answers
        self._done = done
        self._failed = 0

    async def answer(self, requests: Sequence[BatchRequest], at_once: int) -> int:
        """Send all requests, some at a time; return how many were answered with an error.

        Raises:
            httpx.HTTPError: the server cannot be reached. Answers so far are written.
        """
        waiting = iter(requests)
        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=None, limits=limits
        ) as client:

            async def worker() -> None:
                for request in waiting:
                    good = await answer_request(client, request, self._answers, tries=_TRIES)
                    self._failed += not good
                    self._done()

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(at_once, len(requests))):
                        group.create_task(worker())
            except ExceptionGroup as errors:  # a TaskGroup wraps even one error
                raise first_error(errors) from None
        return self._failed

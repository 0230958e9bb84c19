"""`quire bench`: closed-loop load on any OpenAI-compatible URL."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field
from rich.console import Console

from quire.cli.bench_levels import Level, show, summarise
from quire.cli.files import check_writable, read
from quire.cli.keys import ClientOptions
from quire.cli.load import Exchange, LoadError, Target, closed_loop, send
from quire.cli.progress import StartStage, shown
from quire.cli.served import Server, ServerError
from quire.cli.settings import Command
from quire.cli.values import Count, Counts, File, Flag, Seconds
from quire.cli.waiting import loaded
from quire.core.errors import QuireError
from quire.core.limited_files import TEXT_BYTES

T = TypeVar("T")

_INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a run that Ctrl-C ended."""

PROBES = (16, 80)
"""Words of the two prompts by which a server's tokens are counted."""

ROUTES = {"chat": "/chat/completions", "completions": "/completions"}

# Short common words: about one token each in most vocabularies. `calibrate` measures how many.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with"),
    *("his", "they", "at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but"),
    *("what", "all", "were", "when", "we", "there", "can", "an", "your", "which", "their", "said"),
    *("if", "do", "will", "each", "about", "how", "up", "out", "them", "then", "she", "many"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """The contents of a benchmark's requests.

    Attributes:
        prompt_words: words of a generated prompt; ignored if `prompt` is given.
        prompt: a text sent with every request.
        seed: chooses the words; also the sampling seed if answers are sampled.
        ignore_eos: whether to send `ignore_eos: true`, which not every server supports.
    """

    model: str
    endpoint: str = "chat"
    prompt_words: int = 64
    prompt: str | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    @property
    def route(self) -> str:
        """The route below `/v1`."""
        return ROUTES[self.endpoint]

    def body(self, number: int) -> bytes:
        """Return the JSON body of request `number`; each number has its own words."""
        text = self.prompt
        if text is None:
            words = random.Random(f"{self.seed}/{number}").choices(_WORDS, k=self.prompt_words)
            text = " ".join(words)
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        body |= {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature > 0:
            # Not for greedy answers: mlx_lm.server takes no seeded request into a batch.
            body["seed"] = self.seed
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body).encode()


async def run_level(
    target: Target,
    load: Load,
    concurrency: int,
    requests: int,
    *,
    first: int,
    timeout_s: float,
    done: Callable[[], None] = lambda: None,
    cut_off: Callable[[Level], None] = lambda level: None,
) -> Level:
    """Send `requests` requests, numbered from `first`, with `concurrency` in flight.

    Args:
        done: called after each answer.
        cut_off: called with the answers so far if the level is cancelled.
    """
    bodies = [load.body(first + number) for number in range(requests)]
    cpu = time.process_time()
    finished: list[Exchange] = []

    def answered(exchange: Exchange) -> None:
        finished.append(exchange)
        done()

    def level() -> Level:
        cpu_s = time.process_time() - cpu
        return summarise([each.timings() for each in finished], concurrency, cpu_s)

    try:
        await closed_loop(
            target, load.route, bodies, concurrency=concurrency, timeout_s=timeout_s, done=answered
        )
    except asyncio.CancelledError:
        if finished:
            cut_off(level())
        raise
    return level()


async def calibrate(target: Target, load: Load, tokens: int, timeout_s: float) -> int:
    """Return how many words make a prompt of about `tokens` tokens for this server's tokenizer.

    Raises:
        LoadError: the probe failed.
    """
    counts = []
    for words in PROBES:
        probe = Load(load.model, load.endpoint, prompt_words=words, max_tokens=1, seed=load.seed)
        answer = await send(target, load.route, probe.body(-words), timeout_s=timeout_s)
        if answer.error is not None:
            raise LoadError(answer.error)
        if answer.prompt_tokens is None:
            return tokens
        counts.append(answer.prompt_tokens)
    return words_of(tokens, *counts)


def words_of(tokens: int, few: int, many: int) -> int:
    """Return how many words make `tokens` tokens, if `PROBES` words make `few` and `many`."""
    per_word = max((many - few) / (PROBES[1] - PROBES[0]), 0.1)
    template = few - PROBES[0] * per_word
    return max(1, round((tokens - template) / per_word))


def run_async(job: Coroutine[Any, Any, T]) -> T:
    """Run the client on uvloop if installed, which costs half of asyncio's own loop."""
    if sys.platform == "win32":
        return asyncio.run(job)
    import uvloop

    return uvloop.run(job)


async def to_the_end_or_ctrl_c(job: Coroutine[Any, Any, None]) -> bool:
    """Run a job. Return False if Ctrl-C cancelled it."""
    task, loop = asyncio.ensure_future(job), asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    handled = sys.platform != "win32" and threading.current_thread() is threading.main_thread()
    if handled:
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
    finally:
        if handled:
            loop.remove_signal_handler(signal.SIGINT)
    return not stopped


class BenchCommand(ClientOptions, Command):
    """Closed-loop load: each of N streams sends its next request as soon as its last one is
    answered. Reports time to first token (TTFT), time between tokens, and tokens/s over all
    streams.
    """

    command: ClassVar[str] = "bench"
    summary: ClassVar[str] = "measure any OpenAI-compatible server under load"

    model: Annotated[str | None, Flag("NAME")] = Field(
        None, description="default: the first that the server lists"
    )
    endpoint: Literal["chat", "completions"] = Field(
        "chat", description="the endpoint that is measured"
    )
    concurrency: Counts = Field(
        (1, 2, 4, 8), description="numbers of concurrent streams, measured one after the other"
    )
    requests: Count | None = Field(
        None, description="requests per level; default: 4 times the streams"
    )
    prompt_tokens: Count = Field(128, description="approximate prompt tokens")
    prompt_file: File | None = Field(
        None, description="send this text with every request instead of generated prompts"
    )
    max_tokens: Count = Field(128, description="maximum tokens of an answer")
    temperature: Annotated[float, Flag("N")] = Field(
        0.0, description="sampling temperature; default: 0, greedy"
    )
    seed: Annotated[int, Flag("N")] = Field(
        0, description="seed of the prompts and of sampling; default: 0"
    )
    warmup: Annotated[int, Field(ge=0), Flag("N")] = Field(
        2, description="warm-up requests, which are not counted"
    )
    ignore_eos: bool = Field(
        False, description="request full-length answers, if the server supports it"
    )
    timeout: Seconds = Field(600.0, description="limit of a request")
    report: File | None = Field(
        None, alias="json", description="also write the results to this file, as JSON"
    )

    def run(self) -> int:
        """Run the levels and print the table. Return 1 if a request failed, 2 if none could be
        sent.
        """
        console = Console(stderr=True)
        try:
            target = Target.parse(self.url, self.key)
            check_writable(self.report, "--json")
            model = self._loaded_model(Server(self.url, self.key))
            levels: list[Level] = []
            with shown(console) as start_stage:
                measuring = self._measure(
                    levels, model, target, console=console, start_stage=start_stage
                )
                interrupted = not run_async(to_the_end_or_ctrl_c(measuring))
        except (QuireError, LoadError, ServerError, ValueError, OSError) as error:
            console.print(
                f"quire bench: {error}",
                style="red",
                markup=False,
                highlight=False,
                soft_wrap=not console.is_terminal,
            )
            return 2
        if interrupted:
            console.print(f"quire bench: {self._stopped(levels)}", style="yellow", highlight=False)
        code = self._report(model, levels, Console()) if levels else 0
        return _INTERRUPTED if interrupted else code

    def _loaded_model(self, server: Server) -> str:
        """Return the model's name. A Quire server loads it now, so that no request waits for it."""
        try:
            listed = server.models()
        except ServerError:
            if self.model is None:
                raise
            return self.model  # some servers list none; a request tells what is wrong
        name = self.model or str(listed[0]["id"])
        if any(each["id"] == name and each.get("state") == "unloaded" for each in listed):
            loaded(server, name)
        return name

    async def _measure(
        self,
        levels: list[Level],
        model: str,
        target: Target,
        console: Console,
        start_stage: StartStage,
    ) -> None:
        """Measure the levels. Each is added to `levels` when it is done, or cancelled."""
        run = partial(run_level, target, await self._load(model, target), timeout_s=self.timeout)
        first = self.warmup
        if first:
            warm = await run(first, first, first=0, done=start_stage("warming up", first))
            if warm.failed:
                raise LoadError(warm.errors[0][0])
        for concurrency in self.concurrency:
            requests = self._requests(concurrency)
            streams = "1 stream" if concurrency == 1 else f"{concurrency} streams"
            done = start_stage(f"requests in {streams}", requests)
            level = await run(concurrency, requests, first=first, done=done, cut_off=levels.append)
            first += requests
            levels.append(level)
            told = f"{streams}: {level.tokens_per_s:,.1f} tokens/s"
            console.print(told, style="dim")

    def _requests(self, concurrency: int) -> int:
        """Return how many requests a level has."""
        return self.requests or 4 * concurrency

    def _stopped(self, levels: Sequence[Level]) -> str:
        """Say how far a run came that Ctrl-C ended."""
        whole = sum(each.requests == self._requests(each.concurrency) for each in levels)
        told = f"stopped after {whole} of {len(self.concurrency)} levels"
        if whole == len(levels):
            return told
        last = levels[-1]
        asked = self._requests(last.concurrency)
        return f"{told} and {last.requests} of the next level's {asked} requests"

    async def _load(self, model: str, target: Target) -> Load:
        """Return the requests, with prompts of about the wanted number of tokens."""
        prompt = None
        if self.prompt_file is not None:
            prompt = read(self.prompt_file, "--prompt-file", TEXT_BYTES)
        load = Load(
            model=model,
            endpoint=self.endpoint,
            prompt=prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )
        if prompt is not None:
            return load
        words = await calibrate(target, load, self.prompt_tokens, timeout_s=self.timeout)
        return replace(load, prompt_words=words)

    def _report(self, model: str, levels: list[Level], console: Console) -> int:
        title = f"{model} at {self.url}, {self.endpoint}, {self.max_tokens} tokens an answer"
        show(levels, title, console)
        if any(level.events < 0.9 * level.completion_tokens for level in levels):
            console.print(
                "Some events held several tokens: gaps are measured between events, not tokens."
            )
        if not all(level.tokens_from_usage for level in levels):
            console.print(
                "The server reported no usage: each event with text is counted as one token."
            )
        if max(level.client_cpu for level in levels) > 0.8:
            console.print(
                "The load client used most of a core: the server may be faster than shown."
            )
        if self.report:
            settings = {**self.model_dump(mode="json", exclude=_PRIVATE), "model": model}
            report = {"settings": settings, "levels": [asdict(level) for level in levels]}
            self.report.write_text(json.dumps(report, indent=2) + "\n")
        failed = sum(level.failed for level in levels)
        for level in levels:
            for message, count in level.errors:
                console.print(
                    f"{count} of {level.requests} requests at {level.concurrency} streams failed: "
                    f"{message}",
                    style="red",
                    markup=False,
                )
        return 1 if failed else 0


_PRIVATE = {"api_key", "api_key_file", "report", "config"}
"""Options never written to a report: the key is a secret, the others are not settings of
the load.
"""

"""One structured line a request, and the header by which a client can name its request."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.shared.auth import caller_of
from quire.api.shared.foreign import shown
from quire.api.shared.notes import LogLine, note, notes
from quire.api.shared.refusals import Refusal
from quire.core.figures import duration
from quire.core.ids import new_id
from quire.core.logs import WATCH_HEADER
from quire.serving.streams import GenerationStream, Times

log = logging.getLogger("quire.access")

_TIMES = "quire.times"
_CLIENT_LEFT = 499
OTHER = "other"
_LONGEST_PATH = 80
"""Most characters of a refused request's path in the log."""
_MOST_IGNORED = 64
_POLLED = frozenset({"/metrics", "/health", "/page/{file}"})
"""Routes that monitoring polls; successful requests are logged at debug level."""
_WATCHED = frozenset({"/v1/models", "/v1/models/{name:path}"})
"""Routes that the page or a waiting command polls; they are logged at debug level."""
_HEAD = frozenset({"method", "path", "status", "ms", "id"})
"""Fields with a fixed position in a readable log line."""

IGNORED_HEADER = b"x-quire-ignored-fields"
"""Response header that lists the request's fields without effect."""


def note_ignored(scope: Scope, fields: Iterable[str]) -> None:
    """Name fields of a request that have no effect, in its log line and to its client.

    Args:
        fields: paths of the fields; clients may have invented them.
    """
    named: list[str] = notes(scope).setdefault("ignored_fields", [])
    for path in fields:
        name = shown(path)
        if name not in named and len(named) < _MOST_IGNORED:
            named.append(name)


def ignored_fields(scope: Scope) -> list[str]:
    """Return the fields of a request that `note_ignored` named so far."""
    named: list[str] = notes(scope).get("ignored_fields", [])
    return named


def note_run(scope: Scope, run: GenerationStream) -> None:
    """Add a finished run to the access log line, and keep its times for tracing."""
    note(scope, run.summary())
    scope[_TIMES] = run.times


@dataclass(frozen=True, slots=True)
class Access:
    """A finished request, for the log and for tracing.

    Attributes:
        caller: see `caller_of`.
        route: the template of its path; `other` where there is none.
        polled: whether it is a repeated poll, such as the page's.
        started, ended: by `time.perf_counter`.
        headers: headers as the client sent them.
        line: fields of the log line.
        times: times of its run; None if nothing ran.
    """

    caller: str
    route: str
    polled: bool
    started: float
    ended: float
    headers: Sequence[tuple[bytes, bytes]]
    line: LogLine
    times: Times | None

    @property
    def refusal(self) -> Refusal | None:
        """The refusal to count, if the request was refused before anything ran. Files that browsers
        request by themselves do not count.
        """
        line = self.line
        guessed = self.route == OTHER and line["method"] != "POST"
        left = line["status"] == _CLIENT_LEFT
        if self.times is not None or self.polled or guessed or left or "error" not in line:
            return None
        message = line["error"]["message"]
        return Refusal(
            line["path"][:_LONGEST_PATH], line.get("model"), line["status"], message=message
        )


class AccessLog:
    """Middleware around everything: names each request, times it, and logs it as one line.

    Args:
        observe: called with each finished request; its status is 499 if the client left early.
        routes: a path is observed as its route's template, or as `other`, so that clients cannot
            invent labels.
        trace: called likewise; it must not block.
    """

    def __init__(
        self,
        app: ASGIApp,
        observe: Callable[[Access], None],
        routes: Sequence[Route],
        trace: Callable[[Access], None] | None = None,
    ) -> None:
        self._app = app
        self._observe = observe
        self._trace = trace
        self._routes = [(route.path_regex, route.path_format) for route in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, started, status = new_id(), time.perf_counter(), _CLIENT_LEFT
        details = notes(scope)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"request-id", request_id.encode()),
                ]
                if ignored := details.get("ignored_fields"):
                    message["headers"].append((IGNORED_HEADER, ", ".join(ignored).encode()))
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:  # raised on: only the log line and the metrics need to know
            status = 500
            raise
        finally:
            self._report(scope, request_id, status, started=started)

    def _report(self, scope: Scope, request_id: str, status: int, started: float) -> None:
        """Log a finished request, and pass it to the observers."""
        ended, route = time.perf_counter(), self._label(scope["path"])
        line: LogLine = {
            "id": request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round((ended - started) * 1000, 1),
            **notes(scope),
        }
        polled = _is_polled(route, scope)
        level = logging.DEBUG if polled and status < 400 else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "%s", readable(line), extra={"fields": line})
        access = Access(
            caller_of(scope),
            route,
            polled,
            started=started,
            ended=ended,
            headers=scope["headers"],
            line=line,
            times=scope.get(_TIMES),
        )
        self._observe(access)
        if self._trace is not None:
            self._trace(access)

    def _label(self, path: str) -> str:
        return next((name for pattern, name in self._routes if pattern.match(path)), OTHER)


def _is_polled(route: str, scope: Scope) -> bool:
    if route not in _WATCHED:
        return route in _POLLED
    return any(name == WATCH_HEADER.encode() for name, _ in scope["headers"])


def readable(line: LogLine) -> str:
    """Return a request's line for people: `GET /v1/models 200 1 ms`, then the rest as `name=value`.

    Unknown and empty values are left out. The formatter for machines takes the fields themselves.
    """
    path = _word(line["path"])  # a client may put anything there
    head = f"{line['method']} {path} {line['status']} {duration(line['ms'] / 1000)}"
    words = [f"{name}={_word(value)}" for name, value in _flat(line) if value and name not in _HEAD]
    return " ".join([head, *words, f"id={line['id']}"])


def _flat(line: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, list | tuple):
            yield before + name, ",".join(map(str, value))
        else:
            yield before + name, "" if value is None else str(value)


def _word(text: str) -> str:
    """Quote a value whose end would not be visible in the log line."""
    bare = text.isprintable() and not any(each in text for each in ' "=')
    return text if bare else json.dumps(text)

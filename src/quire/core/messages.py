"""Messages between the HTTP side and the engine's process, sent as `frames`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.config import EngineConfig
from quire.core.info import EngineStats, ModelInfo
from quire.core.pickling import Compact
from quire.core.request import FinishReason, Output, Request


@dataclass(frozen=True, slots=True)
class Open:
    """First message to the engine: the model and settings to open."""

    config: EngineConfig
    log_level: str
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class Submit(Compact):
    """To the engine: the choices of one generation. Shared prompts and images are sent once."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: end a request by the next step.

    Attributes:
        reason: the finish reason to count. The text side also aborts answers that have ended well.
    """

    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class AskStats:
    """To the engine: ask for its counters. The answer repeats the number."""

    number: int


@dataclass(frozen=True, slots=True)
class AskCached:
    """To the engine: ask which blocks a prompt may reuse. The answer repeats the number."""

    number: int


@dataclass(frozen=True, slots=True)
class ChangeAdapter:
    """To the engine: load a LoRA adapter that requests may then name, or unload one.

    Attributes:
        place: a folder or hub id; None unloads it.
    """

    number: int
    name: str
    place: str | None


@dataclass(frozen=True, slots=True)
class Room:
    """To the engine: the answer to `NeedsRoom`, once other models have been unloaded.

    Attributes:
        config: the settings of `Open`, with the memory that the engine may use now.
    """

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class NeedsRoom:
    """Sent by the engine before it reads weights: the model does not fit in memory.

    Attributes:
        message: what does not fit; names both sizes.
    """

    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """From the opening engine: its progress.

    Attributes:
        stage: "weights", counted in bytes, or "warm-up", in batches of requests.
    """

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """From the engine: the model is open."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """From the engine: the model cannot be opened.

    Attributes:
        no_room: it would fit if other models were unloaded.
        setting: see `ModelError`.
    """

    message: str
    no_room: bool = False
    setting: str = ""


NextTokens = tuple[str, tuple[int, ...], int, int]
"""Outputs of one request that consist of more tokens only: its id, the token ids, and the drafts
accepted and rejected so far. A plain tuple is pickled and read ten times as fast as a named one.
"""


StepOutputs = tuple[tuple[Output, ...], tuple[NextTokens, ...]]
"""From the engine: the outputs of one step. The first part has a request's first and last output,
and those that carry more than a token. The second part has all others, which come before these.
It is a plain tuple for the reason that `NextTokens` is one.
"""


@dataclass(frozen=True, slots=True)
class Stats:
    """From the engine: the answer to the `AskStats` of this number."""

    number: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """From the engine: the answer to the `ChangeAdapter` of this number.

    Attributes:
        problem: why nothing was changed; empty on success.
    """

    number: int
    problem: str


@dataclass(frozen=True, slots=True)
class Cached:
    """From the engine: the answer to the `AskCached` of this number; see `Engine.cached`."""

    number: int
    keys: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """Last message from the engine: it cannot continue."""

    message: str


ToEngine = Open | Room | Submit | Abort | AskStats | AskCached | ChangeAdapter
Answer = Stats | Cached | AdapterChanged
FromEngine = Progress | NeedsRoom | Ready | Refused | StepOutputs | Answer | Broken

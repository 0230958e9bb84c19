"""Transcripts of Whisper (arXiv:2212.04356, section 2.3): prompts, token rules, and segments.

A prompt is made of tokens: where a transcript starts, the language, the task, and whether there are
times. What was said before may stand in front. The sound belongs to the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.core.errors import ModelError, RequestError
from quire.core.folder import read_object
from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import Timestamps, TokenRules
from quire.core.values import Values
from quire.serving.placing import Prompt

SpeechTask = Literal["transcribe", "translate"]
STEP_S = 0.02
"""Seconds from one time to the next."""
WHISPER = "whisper"
"""The `model_type` of models whose prompts these are."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcript, with its times in seconds from the start of the sound.

    Attributes:
        tokens: of the text, times left out.
        logprobs: of the tokens; empty if the answer has none.
    """

    start: float
    end: float
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptTokens:
    """The tokens of a model's transcripts, as `generation_config.json` names them.

    Attributes:
        start: starts a transcript.
        end: ends it; tokens below it are text.
        earlier: starts the text before; None if the model has no such token.
        languages: by code, such as `en`; empty for a model of English alone.
        tasks: likewise.
        no_times: says that a transcript has no times. Those are the tokens behind it.
        banned: tokens that no transcript has.
        not_first: tokens with which none starts.
        latest_start: see `Timestamps`.
    """

    start: int
    end: int
    earlier: int | None
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_times: int
    banned: tuple[int, ...]
    not_first: tuple[int, ...]
    latest_start: int | None

    @classmethod
    def open(cls, folder: Path) -> TranscriptTokens:
        """Read `generation_config.json`.

        Raises:
            ModelError: a token is missing.
        """
        file = folder / "generation_config.json"
        values = Values(read_object(file), file=file)
        if not values.has("no_timestamps_token_id"):
            raise ModelError(
                f"{file}: no_timestamps_token_id, the start of the tokens for times, is "
                "missing: take the file from the model's current repository"
            )
        return cls(
            start=values.integer("decoder_start_token_id", minimum=0),
            end=values.integer("eos_token_id", minimum=0),
            earlier=values.integer("prev_sot_token_id")
            if values.has("prev_sot_token_id")
            else None,
            languages=_by_name(values, "lang_to_id"),
            tasks=_by_name(values, "task_to_id"),
            no_times=values.integer("no_timestamps_token_id"),
            banned=tuple(values.integers("suppress_tokens")),
            not_first=tuple(values.integers("begin_suppress_tokens")),
            latest_start=values.integer("max_initial_timestamp_index", minimum=0)
            if values.has("max_initial_timestamp_index")
            else None,
        )

    @property
    def first_time(self) -> int:
        """The token of time zero."""
        return self.no_times + 1

    def language(self, asked: str | None, param: str = "language") -> str | None:
        """Return the code of a language that a request names by its code.

        Returns:
            None if the model has to find out.

        Raises:
            RequestError: the model does not know the language.
        """
        if not self.languages:
            if asked in (None, "", "en"):
                return "en"
            raise RequestError(
                f"'{param}' is '{asked}', but this model was trained on English only.",
                param=param,
                code="invalid_value",
            )
        if not asked:
            return None
        if asked.lower() not in self.languages:
            known = ", ".join(sorted(self.languages))
            raise RequestError(
                f"'{param}' is '{asked[:40]}', which is not one of {known}.",
                param=param,
                code="invalid_value",
            )
        return asked.lower()

    def prompt(
        self,
        item: MediaItem,
        language: str | None,
        task: SpeechTask,
        *,
        times: bool,
        earlier: Sequence[int] = (),
    ) -> Prompt:
        """Return the prompt of a transcript.

        Args:
            item: the sound.
            language: None makes the prompt that asks for the language.
            times: whether the transcript has times.
            earlier: tokens of the text before.
        """
        tokens: tuple[int, ...] = (self.start,)
        if earlier and self.earlier is not None and language is not None:
            tokens = (self.earlier, *earlier, self.start)
        if language is not None and self.languages:
            tokens = (*tokens, self.languages[language], self.tasks[task])
        if language is not None and not times:
            tokens = (*tokens, self.no_times)
        return Prompt(tokens, (PlacedMedia(0, item),))

    def rules(self, *, times: bool) -> TokenRules:
        """Return the rules of a transcript's tokens."""
        banned = dict.fromkeys((*self.banned, self.no_times) if times else self.banned)
        return TokenRules(
            banned=tuple((token,) for token in banned),
            not_first=self.not_first,
            timestamps=Timestamps(self.first_time, self.end, self.latest_start) if times else None,
        )

    def segments(
        self, ids: Sequence[int], start: float, end: float, *, logprobs: Sequence[float] = ()
    ) -> list[Segment]:
        """Return the segments of an answer.

        Args:
            ids: the answer's tokens.
            start, end: the piece of sound, in seconds.
            logprobs: of the tokens, if they were requested.
        """
        spans: list[tuple[float, float, list[int]]] = []  # with the places of its tokens
        opened, text, latest = start, list[int](), start
        for place, token in enumerate(ids):
            if token < self.end:
                text.append(place)
            elif token >= self.first_time:
                latest = min(end, start + (token - self.first_time) * STEP_S)
                if text:
                    spans.append((opened, latest, text))
                opened, text = latest, []
        if text:
            spans.append((opened, end, text))
        return [
            Segment(
                first,
                last,
                tokens=tuple(ids[place] for place in places),
                logprobs=tuple(logprobs[place] for place in places if logprobs),
            )
            for first, last, places in spans
        ]


def _by_name(values: Values, name: str) -> dict[str, int]:
    """Return token ids by what their texts name, without marks around them."""
    if not values.has(name):
        return {}
    named = values.nested(name)
    return {each.strip("<|>"): named.integer(each, minimum=0) for each in named.values}

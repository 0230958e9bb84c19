"""Reads requests for transcripts: the sound in pieces, and a prompt for each.

A model that hears is asked in a conversation. Whisper has prompts of its own, and finds out the
language if no one names it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request

from quire.api.audio.answers import Format
from quire.api.audio.pieces import RATE, as_url, pieces
from quire.api.shared.context import Context, decoding
from quire.api.shared.headers import headers_of
from quire.api.shared.schema import DecodingFields
from quire.core.errors import NotOffered, RequestError
from quire.core.folder import read_object
from quire.media.kinds import limits_of
from quire.media.source import MediaSource
from quire.serving.generation import Generation, NeedsJob, Prepared, Thinking
from quire.serving.media import files_of
from quire.serving.messages import SourcePart, TemplateMessage, text_part
from quire.serving.transcripts import WHISPER, SpeechTask, TranscriptTokens

if TYPE_CHECKING:
    from quire.media.sound import Samples

_MOST_TOKENS = 448
"""Tokens of one piece's text: about twice what is said in 28 seconds."""
_TIMED: tuple[Format, ...] = ("srt", "vtt", "verbose_json")


class TranslationRequest(DecodingFields):
    """Every field of OpenAI's schema, and those of sampling; the form's fields, and its file."""

    task: ClassVar[SpeechTask] = "translate"

    sound: str = Field(description="the file, in base64")
    prompt: str | None = Field(default=None, max_length=4096)
    response_format: Format = "json"

    @property
    def named_language(self) -> str | None:
        """The language of the sound, if the request names it."""
        return None


class TranscriptionRequest(TranslationRequest):
    """Every field of OpenAI's schema, and those of sampling; the form's fields, and its file."""

    task: ClassVar[SpeechTask] = "transcribe"

    language: str | None = Field(default=None, max_length=64)
    stream: Literal[False] | None = Field(
        default=None, description="transcriptions are not streamed"
    )
    timestamp_granularities: list[Literal["segment"]] | None = Field(
        default=None, description="only segments have times, words do not"
    )
    include: None = Field(default=None, description="log-probabilities are not given")
    chunking_strategy: Literal["auto"] | None = None
    languages: None = Field(default=None, description="send language")
    keywords: None = Field(default=None, description="send them in prompt")
    known_speaker_names: None = Field(default=None, description="speakers are not told apart")
    known_speaker_references: None = Field(default=None, description="speakers are not told apart")

    @property
    def named_language(self) -> str | None:
        return self.language


@dataclass(frozen=True, slots=True)
class Whispering:
    """Settings of a Whisper transcript.

    Attributes:
        language: the code of the language; None if the model has to find out.
        times: whether the transcript has times.
        earlier: tokens of the text before.
    """

    tokens: TranscriptTokens
    language: str | None
    task: SpeechTask
    times: bool
    earlier: tuple[int, ...]

    def detecting(self, prepared: Prepared) -> Prepared:
        """Return the generation that finds out the language, of the first piece."""
        tokens, item = self.tokens, prepared.prompts[0].media[0].item
        rules = replace(prepared.spec.rules, allowed=tuple(tokens.languages.values()))
        rules = replace(rules, banned=(), not_first=(), timestamps=None)
        prompt = tokens.prompt(item, language=None, task=self.task, times=False)
        sampling = replace(prepared.spec.sampling, temperature=0.0, times_from=None)
        spec = replace(prepared.spec, max_tokens=1, rules=rules, sampling=sampling)
        return replace(prepared, spec=spec, prompts=(prompt,))

    def asking(self, prepared: Prepared, language: str) -> Prepared:
        """Return the generation of all pieces, whose language is known."""
        prompts = tuple(
            self.tokens.prompt(
                each.media[0].item, language, self.task, times=self.times, earlier=self.earlier
            )
            for each in prepared.prompts
        )
        return replace(prepared, prompts=prompts)


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A request for a transcript, read.

    Attributes:
        pieces: start and end of each piece of the sound, in seconds.
        prepared: a prompt for each piece.
        language: as the client named it; empty if it did not.
        whisper: None for a model that is asked in a conversation.
    """

    pieces: Sequence[tuple[float, float]]
    prepared: Prepared
    format: Format
    language: str
    task: SpeechTask
    whisper: Whispering | None


async def read_transcription(context: Context, request: Request, body: bytes) -> SpeechRequest:
    """Read the body of `POST /v1/audio/transcriptions`."""
    return await _read(context, request, body, schema=TranscriptionRequest)


async def read_translation(context: Context, request: Request, body: bytes) -> SpeechRequest:
    """Read the body of `POST /v1/audio/translations`."""
    return await _read(context, request, body, schema=TranslationRequest)


async def _read(
    context: Context, request: Request, body: bytes, schema: type[TranslationRequest]
) -> SpeechRequest:
    if context.jobs is not None:
        raise NeedsJob  # strangers' sound is decoded there
    fields = context.parse(request, body, schema)
    context.check_model(fields.model)
    if "audio" not in context.service.modalities:
        raise NotOffered(
            f"{context.service.name} takes no audio: serve a model whose 'modalities' in "
            "/v1/models hold 'audio'.",
            code="unsupported_model",
        )
    samples = _decoded(context, fields)
    found = list(pieces(samples))
    verbose = fields.response_format == "verbose_json"
    common = decoding(context, fields, headers_of(request.scope), logprobs=0 if verbose else None)
    common = replace(common, token_ids=verbose)
    if fields.temperature is None:
        common = replace(common, sampling=replace(common.sampling, temperature=0.0))
    whisper = None
    if context.service.info.model_type == WHISPER:
        whisper = _whispering(context, fields)
        prepared = await _whispered(context, samples, found, common=common, whisper=whisper)
    else:
        prepared = await _conversed(
            context, samples, found, common=common, asked=_asked(context, fields)
        )
    return SpeechRequest(
        [(start / RATE, end / RATE) for start, end in found],
        prepared,
        fields.response_format,
        language=fields.named_language or "",
        task=fields.task,
        whisper=whisper,
    )


def _decoded(context: Context, fields: TranslationRequest) -> Samples:
    # Here, since the HTTP side imports this module, and decodes nothing.
    from quire.media.sound import decode

    try:
        data = base64.b64decode(fields.sound, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError("'sound' is not valid base64.", param="sound") from error
    limits = limits_of(context.config.media_limits)["audio"].each
    return decode(data, param="file", rate=RATE, limits=limits)


def _contents(samples: Samples, found: Sequence[tuple[int, int]]) -> Iterator[SourcePart]:
    """Yield each piece of the sound as a part of a message."""
    for start, end in found:
        source = MediaSource(as_url(samples[start:end]), "file", "file", kind="audio")
        yield {"type": "audio", "source": source}


async def _conversed(
    context: Context,
    samples: Samples,
    found: Sequence[tuple[int, int]],
    common: Generation,
    asked: str,
) -> Prepared:
    """Return a prompt for each piece, which asks for its transcript in a message."""
    made: list[Prepared] = []
    for heard in _contents(samples, found):
        question: TemplateMessage = {"role": "user", "content": [heard, text_part(asked)]}
        spec = replace(
            common,
            messages=(question,),
            max_tokens=_MOST_TOKENS,
            thinking=Thinking(enabled=False),
        )
        made.append(await context.prepare(spec))
    prompts = tuple(prompt for each in made for prompt in each.prompts)
    return replace(made[0], prompts=prompts)


def _asked(context: Context, fields: TranslationRequest) -> str:
    """Return the question to the model: its own from its folder, else a common one."""
    file = Path(context.service.info.path) / "generation_config.json"
    own = read_object(file).get("transcription_prompt")
    if fields.task == "translate":
        asked = (
            "Translate the following speech segment into English. "
            "Only output the translation, with no newlines."
        )
    elif isinstance(own, str):
        asked = own
    else:
        language = fields.named_language or "its original language"
        asked = (
            f"Transcribe the following speech segment in {language}. "
            "Only output the transcription, with no newlines."
        )
    return f"{fields.prompt}\n{asked}" if fields.prompt else asked


def _whispering(context: Context, fields: TranslationRequest) -> Whispering:
    tokens = TranscriptTokens.open(Path(context.service.info.path))
    if fields.task not in tokens.tasks and fields.task != "transcribe":
        raise NotOffered(
            f"{context.service.name} cannot translate: it was trained on English only.",
            code="unsupported_model",
        )
    earlier: tuple[int, ...] = ()
    if fields.prompt and fields.prompt.strip():
        tokenizer = context.service.tokenizer
        encoded = tokenizer.encode(f" {fields.prompt.strip()}", add_special_tokens=False)
        most = context.service.info.context_length // 2 - 1
        earlier = tuple(each for each in encoded if each < tokens.end)[-most:]
    language = tokens.language(fields.named_language)
    return Whispering(
        tokens, language, fields.task, times=fields.response_format in _TIMED, earlier=earlier
    )


async def _whispered(
    context: Context,
    samples: Samples,
    found: Sequence[tuple[int, int]],
    common: Generation,
    whisper: Whispering,
) -> Prepared:
    """Return a prompt for each piece, without its language where the model has to find out."""
    tokens, times = whisper.tokens, whisper.times
    spec = replace(common, token_ids=True, rules=tokens.rules(times=times))
    if times:
        spec = replace(spec, sampling=replace(spec.sampling, times_from=tokens.first_time))
    prompts = []
    for heard in _contents(samples, found):
        said: TemplateMessage = {"role": "user", "content": [heard]}
        loaded = await context.load_media(replace(spec, messages=(said,)))
        ((part,),) = files_of(loaded.messages)
        prompts.append(
            tokens.prompt(
                part.item, whisper.language, whisper.task, times=times, earlier=whisper.earlier
            )
        )
    return Prepared(spec, tuple(prompts), bare=True)

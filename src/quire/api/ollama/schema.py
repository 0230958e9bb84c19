"""Fields of Ollama's requests: https://docs.ollama.com/api."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from starlette.types import Scope

from quire.api.shared.access import note_ignored
from quire.api.shared.content import Tool
from quire.api.shared.durations import KeepAlive
from quire.api.shared.formats import GuidedFields
from quire.api.shared.numbers import Integer, Number
from quire.api.shared.schema import DecodingFields, History, Strings, UnlessEmpty, Wire
from quire.api.shared.thinking import ThinkingFields
from quire.core.errors import RequestError
from quire.core.sampling_params import LIMITS
from quire.serving.messages import JsonObject

_WITHOUT_EFFECT = frozenset(
    {
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa"),
        *("use_mmap", "use_mlock", "low_vram", "vocab_only", "f16_kv", "logits_all"),
        *("tfs_z", "repeat_last_n", "mirostat", "mirostat_eta", "mirostat_tau"),
        *("penalize_newline", "draft_num_predict"),
    }
)


class ModelOptions(History):
    """The field `options`. Options of Ollama's loader, and samplers that Quire lacks, have no
    effect.
    """

    temperature: Annotated[Number, Field(**LIMITS["temperature"])] | None = None
    top_p: Annotated[Number, Field(**LIMITS["top_p"])] | None = None
    top_k: Annotated[Integer, Field(**LIMITS["top_k"])] | None = None
    min_p: Annotated[Number, Field(**LIMITS["min_p"])] | None = None
    typical_p: Annotated[Number, Field(**LIMITS["typical_p"])] | None = None
    presence_penalty: Annotated[Number, Field(**LIMITS["presence_penalty"])] | None = None
    frequency_penalty: Annotated[Number, Field(**LIMITS["frequency_penalty"])] | None = None
    repeat_penalty: Annotated[Number, Field(**LIMITS["repetition_penalty"])] | None = None
    seed: Integer | None = Field(default=None, ge=-(2**63), lt=2**63)
    num_predict: Integer | None = Field(default=None, ge=-2, lt=2**31)
    stop: Strings | None = None

    model_config = ConfigDict(extra="allow")

    def note(self, scope: Scope) -> None:
        """Tell the client of options that have no effect.

        Raises:
            RequestError: an option that Ollama does not have.
        """
        given = self.model_extra or {}
        if unknown := given.keys() - _WITHOUT_EFFECT:
            name = f"options.{min(unknown)}"
            message = f"'{name}' is not an option of Ollama's: leave it out."
            raise RequestError(message, param=name, code="unknown_parameter")
        note_ignored(scope, [f"options.{name}" for name, it in given.items() if it is not None])

    def decoding(self, keep_alive: float | None) -> DecodingFields:
        """Return the options under the names that other protocols use."""
        return DecodingFields(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            typical_p=self.typical_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repeat_penalty,
            seed=None if self.seed == -1 else self.seed,
            keep_alive=keep_alive,
        )

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of an answer; None means as many as the context holds."""
        return None if self.num_predict is None or self.num_predict < 0 else self.num_predict

    @property
    def stops(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(each for each in stop if each)


class AnswerFields(GuidedFields, ThinkingFields):
    """Fields that `/api/chat` and `/api/generate` share."""

    model: str | None = None
    stream: bool | None = None
    options: ModelOptions | None = None
    keep_alive: Annotated[KeepAlive | None, UnlessEmpty] = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives with log-probabilities for each token; None reports no
        log-probabilities.
        """
        return (self.top_logprobs or 0) if self.logprobs else None


class CalledFunction(History):
    """A call's name and its arguments, an object."""

    name: str
    arguments: JsonObject | str | None = None


class ToolCall(History):
    """A call that the assistant made."""

    id: str | None = None
    function: CalledFunction


class Message(History):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(AnswerFields):
    """The body of `/api/chat`. Without messages, it loads the model, or unloads it if `keep_alive`
    is 0.
    """

    messages: list[Message] = Field(default_factory=list)
    tools: list[Tool] | None = Field(default=None, max_length=1024)


class GenerateRequest(AnswerFields):
    """The body of `/api/generate`. Without a prompt, it loads the model, or unloads it if
    `keep_alive` is 0.
    """

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = Field(
        default=None,
        description="the text after the answer, if the tokenizer has fill-in-the-middle tokens",
    )
    template: Annotated[None, UnlessEmpty] = Field(
        default=None, description="the model's chat template is always used"
    )
    context: list[int] | None = Field(
        default=None, description="use /api/chat, which takes messages"
    )


class EmbeddingsRequest(Wire):
    """The body of `/api/embeddings`, the former route of `/api/embed`."""

    model: str | None = None
    prompt: str = ""
    options: ModelOptions | None = None
    keep_alive: Annotated[KeepAlive | None, UnlessEmpty] = None


class EmbedRequest(Wire):
    """The body of `/api/embed`."""

    model: str | None = None
    input: str | list[str] = ""
    truncate: bool | None = None
    dimensions: Integer | None = Field(default=None, ge=0, le=1 << 20)
    options: ModelOptions | None = None
    keep_alive: Annotated[KeepAlive | None, UnlessEmpty] = None


class PullRequest(Wire):
    """The body of `/api/pull`."""

    model: str | None = None
    name: str | None = Field(default=None, description="the former name of 'model'")
    stream: bool | None = None
    insecure: bool | None = Field(default=None, description="no effect")


class ShowRequest(Wire):
    """The body of `/api/show`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

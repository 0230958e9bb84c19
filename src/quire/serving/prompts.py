"""Makes prompts of token ids from messages and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.constraints.schemas import with_objects
from quire.core.copies import changed
from quire.core.errors import ContextOverflow, RequestError, TextTooLong
from quire.core.info import ModelInfo
from quire.serving.generation import Generation, NeedsJob, Prepared, TextPair
from quire.serving.media import (
    MediaLoader,
    as_template_reads,
    files_of,
    template_content,
    text_length,
)
from quire.serving.messages import TemplateTool
from quire.serving.placing import Prompt
from quire.text.controls import Controls
from quire.text.template import ChatTemplate, NotContinued
from quire.text.tokenizer import Tokenizer
from quire.text.volatile import drop_from_messages

_LIGHT, _FEW = 16_384, 256
"""Most characters and messages that are rendered and encoded in the event loop."""
_WHOLE = 1 << 18
"""Most characters of a text that is encoded at once. A longer one is first counted in pieces, since
encoding takes hundreds of bytes per token.
"""
_COUNTED = 1 << 18
"""Tokens up to which a text is counted, even if the context holds fewer."""
THINKING_VARIABLES = frozenset({"enable_thinking", "thinking"})
"""Template variables that switch reasoning on or off."""

RESERVED_VARIABLES = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "continue_final", "documents"}
)
"""Template variables that only the server sets."""


class Prompts:
    """Renders, loads and encodes the prompts of one model.

    Args:
        info: description of the served model.
        media: reads media, if the model takes any.
        controls: keeps clients' text from becoming control tokens.
        drop_volatile: whether to remove the parts of agents' prompts that change with each request.
        default_system: system message for conversations without one; empty adds none.
    """

    def __init__(
        self,
        info: Callable[[], ModelInfo],
        tokenizer: Tokenizer,
        template: ChatTemplate,
        media: MediaLoader,
        controls: Controls,
        *,
        drop_volatile: bool = True,
        default_system: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.media = media
        self._info = info
        self._controls = controls
        self._drop_volatile = drop_volatile
        self._default_system = default_system

    async def prepare(self, spec: Generation, *, light: bool = False) -> Prepared:
        """Render, fetch, decode and encode a request. The time grows with its size.

        Args:
            light: raise `NeedsJob` if it might take more than a few milliseconds.

        Raises:
            RequestError: it cannot be served.
            NeedsJob: it has to be done in a job.
        """
        if not spec.vector and not self._info().generates:
            raise RequestError(
                f"This model ({self._info().model_type}) is an encoder: it embeds and scores "
                "texts, and generates none. Use /v1/embeddings, /v1/rerank or /v1/score.",
                param="model",
                code="unsupported_model",
            )
        limit = self._longest(spec) if spec.truncate is None else self._countable
        loaded, prompts = self._prompts(await self.load_media(spec, light=light), limit)
        started, anew = "", list[Prompt]()
        if loaded.continue_final and loaded.format is not None and not loaded.tool_choice.forced:
            started = self._started(loaded)
            if loaded.or_anew:
                _, anew = self._prompts(loaded.anew, limit)
        for prompt in (*prompts, *anew):
            self._check_prompt(spec, prompt.tokens)
        return Prepared(
            loaded.without_prompt,
            tuple(prompts),
            bare=not spec.messages,
            started=started,
            anew=tuple(anew),
        )

    async def load_media(self, spec: Generation, *, light: bool = False) -> Generation:
        """Return the generation with its media fetched and read, for several uses.

        Args:
            light: as in `prepare`.

        Raises:
            RequestError: the model does not take the kind, there are too many, or one is of no
                use.
            NeedsJob: it has to be done in a job.
        """
        if light:
            self._check_light(spec)
        messages = await self.media.load(spec.messages)
        return spec if messages is spec.messages else changed(spec, messages=messages)

    async def tokens(self, spec: Generation, *, light: bool = False) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt; `light` as in `prepare`.

        Raises:
            ContextOverflow: there are more tokens than the context holds, and more than 262,144.
            RequestError: there is no message and no prompt, the tool to be called is unknown, an
                item cannot be used, or the template refuses the messages.
            NeedsJob: it has to be done in a job.
        """
        loaded = await self.load_media(spec, light=light)
        return [prompt.tokens for prompt in self._prompts(loaded, self._countable)[1]]

    @property
    def _limit(self) -> int:
        return self._info().context_length

    def _longest(self, spec: Generation) -> int:
        """Return the most tokens of a prompt, and of an answer if there is one, together."""
        return self._limit if spec.max_prompt is None else min(self._limit, spec.max_prompt)

    @property
    def _countable(self) -> int:
        return max(self._limit, _COUNTED)

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the token ids of a bare text.

        Raises:
            ContextOverflow: as `tokens`.
        """
        self._check_text(text, param, self._countable)
        if add_special_tokens:
            return tuple(self.tokenizer.encode_prompt(text))
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _prompts(self, spec: Generation, limit: int) -> tuple[Generation, list[Prompt]]:
        """Return the encoded prompts and the generation that they belong to; see
        `Generation.or_anew`.

        A text certain to exceed `limit` tokens is refused before encoding.
        """
        spec.tool_choice.check([tool.name for tool in spec.offered_tools])
        if not spec.messages and not spec.prompts:
            param = spec.names.messages
            raise RequestError(
                f"'{param}' is missing or empty.",
                param=param,
                code="missing_required_parameter",
            )
        if not spec.messages:
            return spec, [self._bare(spec, each, limit) for each in spec.prompts]
        try:
            return spec, [self._truncated(spec, self._conversation(spec, limit))]
        except NotContinued:
            if not spec.or_anew:
                raise
            return spec.anew, [self._truncated(spec, self._conversation(spec.anew, limit))]

    def _bare(
        self, spec: Generation, prompt: str | TextPair | tuple[int, ...], limit: int
    ) -> Prompt:
        """Return a prompt without a template."""
        if isinstance(prompt, tuple):
            return self._truncated(spec, Prompt(prompt))
        texts = (prompt,) if isinstance(prompt, str) else (prompt.first, prompt.second)
        for text in texts:
            self._check_text(text, spec.names.prompt, limit)
        if self._info().generates:
            assert len(texts) == 1, "decoders read no pairs"
            return self._truncated(spec, Prompt(tuple(self.tokenizer.encode_prompt(texts[0]))))
        most = self._longest(spec) if spec.truncate == -1 else spec.truncate
        left = spec.truncate_left is True
        encoded = self.tokenizer.encode_texts(*texts, most=most, keep_end=left)
        typed = self._info().token_types and any(encoded.types)
        return Prompt(encoded.ids, token_types=encoded.types if typed else ())

    def _truncated(self, spec: Generation, prompt: Prompt) -> Prompt:
        """Return the part of a prompt that `spec.truncate` keeps.

        Raises:
            RequestError: it would cut media.
        """
        kept, tokens = spec.truncate, prompt.tokens
        if kept == -1:
            answer = 0 if spec.vector else max(1, spec.max_tokens or 1)
            kept = max(1, self._longest(spec) - answer)
        if kept is None or len(tokens) <= kept:
            return prompt
        if prompt.media:
            raise RequestError(
                f"'truncate_prompt_tokens' keeps {kept} of the prompt's {len(tokens)} tokens, "
                "but a prompt with media cannot be truncated: leave it out, or shorten the "
                "messages.",
                param="truncate_prompt_tokens",
                code="invalid_value",
            )
        left = spec.truncate_left is not False
        return Prompt(tokens[len(tokens) - kept :] if left else tokens[:kept])

    def _check_light(self, spec: Generation) -> None:
        """Raise `NeedsJob` if the request is large or contains media."""
        size = sum(text_length(message) for message in spec.messages)
        size += sum(map(len, spec.prompts))
        if size > _LIGHT or len(spec.messages) > _FEW or self.media.wanted(spec.messages):
            raise NeedsJob

    def _conversation(self, spec: Generation, limit: int) -> Prompt:
        """Return the prompt of messages with their media read."""
        files = files_of(spec.messages)
        rendered = self.media.places.spell(self.render(spec), files)
        self._check_text(self._controls.bare(rendered), spec.names.messages, limit)
        ids = self._controls.encode(rendered)
        items = [part.item for parts in files for part in parts]
        return self.media.places.place(ids, items) if items else Prompt(tuple(ids))

    def render(self, spec: Generation) -> str:
        """Render the messages with the template. `Controls` covers text from clients."""
        controls = self._controls
        messages: Sequence[Mapping[str, object]] = spec.messages
        if self._drop_volatile:
            messages = drop_from_messages(messages)
        messages = self._with_system(messages)
        tools = spec.tools if spec.tool_choice.mode != "none" else ()
        return self.template.render(
            [controls.cover_message(as_template_reads(message)) for message in messages],
            tools=[controls.cover(_with_readable_schema(tool)) for tool in tools] or None,
            add_generation_prompt=not spec.continue_final,
            continue_final=spec.continue_final,
            marks=self.media.places.marks_by_kind,
            **controls.cover(self._variables(spec)),
        )

    def _with_system(
        self, messages: Sequence[Mapping[str, object]]
    ) -> Sequence[Mapping[str, object]]:
        """Return the messages, with the default system message first if they have none."""
        own = any(message["role"] in ("system", "developer") for message in messages)
        if own or not self._default_system:
            return messages
        return [{"role": "system", "content": self._default_system}, *messages]

    def _started(self, spec: Generation) -> str:
        """Return the text of the answer that the last message starts."""
        content = template_content(spec.messages[-1]["content"] or "")
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        return self._controls.without_reasoning(content)

    def _variables(self, spec: Generation) -> dict[str, object]:
        """Return the template's variables beside messages and tools."""
        thinking, variables = spec.thinking, dict(spec.template_kwargs)
        if thinking.enabled is not None:
            for name in THINKING_VARIABLES & self.template.variables:
                variables.setdefault(name, thinking.enabled)
        if thinking.effort is not None and "reasoning_effort" in self.template.variables:
            variables.setdefault("reasoning_effort", thinking.effort)
        return variables

    def _check_text(self, text: str, param: str, limit: int) -> None:
        """Raise `ContextOverflow` for a text far too long, in constant memory."""
        if len(text) > _WHOLE:
            count = self.tokenizer.count_at_least(text, limit)
            if count >= limit:
                raise ContextOverflow(count, self._limit, param=param, at_least=True)

    def _check_prompt(self, spec: Generation, prompt: tuple[int, ...]) -> None:
        param = spec.names.messages if spec.messages else spec.names.prompt
        limit = self._longest(spec)
        if not prompt:
            raise RequestError(f"'{param}' has no tokens.", param=param, code="invalid_value")
        if spec.vector and len(prompt) > limit:
            own = limit == spec.max_prompt
            because = "max_seq_length of its sentence_bert_config.json" if own else "its context"
            raise TextTooLong(len(prompt), limit, param=param, because=because)
        if not spec.vector and len(prompt) >= limit:
            raise ContextOverflow(len(prompt), limit, param=param)
        self.check_vocabulary(prompt, param)

    def check_vocabulary(self, ids: Sequence[int], param: str) -> None:
        """Raise `RequestError` if a token id is outside the model's vocabulary."""
        if not ids:
            return
        vocabulary, worst = self._info().vocab_size, max(ids)
        if worst >= vocabulary:
            raise RequestError(
                f"Token {worst} in '{param}' is not below the vocabulary's size, {vocabulary}.",
                param=param,
                code="invalid_value",
            )


def _with_readable_schema(tool: TemplateTool) -> TemplateTool:
    function = tool["function"]
    if "parameters" not in function:
        return tool
    return {**tool, "function": {**function, "parameters": with_objects(function["parameters"])}}

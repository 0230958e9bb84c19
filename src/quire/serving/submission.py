"""Turns prepared generations into requests to the engine, and streams of their events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from quire.core.copies import changed
from quire.core.errors import EngineFailure, RequestError
from quire.core.ids import new_id
from quire.core.request import NO_BEGINNING, GrammarSpec, Request
from quire.serving.answer_grammar import AnswerGrammar
from quire.serving.constraints import Constraints
from quire.serving.generation import Prepared
from quire.serving.interface import EngineClient
from quire.serving.media_in_flight import MediaInFlight
from quire.serving.placing import Prompt
from quire.serving.streams import ChoiceStream, GenerationStream, Observer, Unobserved
from quire.text.detokenizer import Detokenizer
from quire.text.dialects.base import Dialect, Vocabulary
from quire.text.output import OutputStream
from quire.text.stops import StopMatcher, StopStrings
from quire.text.tokenizer import Tokenizer

_MOST_PREDICTED = 1 << 16
"""Most characters of a prediction that are used; encoding them takes milliseconds."""
_KEPT_SNAPSHOTS = 64


@dataclass(frozen=True, slots=True)
class Constrained:
    """A generation request with the grammar that constrains it; see `Prepared.anew`."""

    prepared: Prepared
    grammar: AnswerGrammar


class Submission:
    """Queues generations.

    Args:
        constraints: makes the constraints of answers.
        dialect: dialect of answers to messages.
        plain: dialect of answers to bare prompts.
        default_max_tokens: default limit of answers; None means what the context has room for.
        deadline_s: seconds after which a request ends with an error; None means never.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        dialect: Dialect,
        plain: Dialect,
        constraints: Constraints,
        *,
        default_max_tokens: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._dialect = dialect
        self._plain = plain
        self._media = MediaInFlight()
        self._constraints = constraints
        self._observer: Callable[[str, int], Observer] = lambda caller, tokens: Unobserved()
        self._default_max_tokens = default_max_tokens
        self._deadline_s = deadline_s

    def observe(self, observer: Callable[[str, int], Observer]) -> None:
        """Set the function that makes an observer of each choice, from caller and prompt tokens."""
        self._observer = observer

    async def constrain(self, prepared: Prepared) -> Constrained:
        """Compile the grammar of a prepared generation, here or in a job. This may take seconds.

        It holds no resources, and cancelling it ends the compilation.

        Raises:
            RequestError: it cannot be served.
            EngineFailure: the engine cannot continue.
        """
        if self._client.failure is not None:
            raise EngineFailure(f"The engine has failed: {self._client.failure}")
        try:
            return Constrained(prepared, await self._constraints.build(prepared))
        except RequestError as error:
            if not prepared.anew or error.code != NO_BEGINNING:
                raise
            anew = Prepared(prepared.spec.anew, prepared.anew, prepared.bare)
            return Constrained(anew, await self._constraints.build(anew))

    async def submit(self, constrained: Constrained) -> GenerationStream:
        """Queue a generation. The returned stream owns its requests.

        Nothing is awaited once the requests are queued.

        Raises:
            RequestError: it cannot be served; nothing has been queued.
            EngineFailure: the engine cannot continue.
        """
        prepared, grammar = constrained.prepared, constrained.grammar
        spec, prompts = prepared.spec, prepared.prompts
        stops = StopStrings(spec.stops, spec.names.stops)
        requests: list[Request] = []
        outputs: list[OutputStream] = []
        for prompt in prompts:
            first = self._request(prepared, prompt, grammar.grammar)
            for _ in range(spec.n):
                if requests:
                    await asyncio.sleep(0)  # each looks at the prompt, which may be long
                requests.append(_choice_of(first, len(requests)) if requests else first)
                outputs.append(self._output(prepared, prompt, stops))
        self._media.check_room(prompts)
        tickets = self._client.submit(requests)
        self._media.hold(tickets, prompts)
        choices = [
            ChoiceStream(
                ticket,
                output,
                self._observer(spec.caller, len(request.prompt)),
                index=index,
                show_reasoning=spec.show_reasoning,
                show_progress=spec.show_progress,
            )
            for index, (request, ticket, output) in enumerate(
                zip(requests, tickets, outputs, strict=True)
            )
        ]
        return GenerationStream([prompt.tokens for prompt in prompts], choices, grammar.unenforced)

    def _output(self, prepared: Prepared, prompt: Prompt, stops: StopStrings) -> OutputStream:
        """Return the parser that turns one choice's tokens into events."""
        spec, dialect = prepared.spec, self._plain if prepared.bare else self._dialect
        continues = spec.continue_final or prepared.bare
        return OutputStream(
            Detokenizer(
                self._tokenizer,
                skip_special=spec.skip_special,
                after=prompt.tokens if continues else (),
            ),
            dialect.parser(prompt.tokens, spec.offered_tools, self._vocabulary),
            StopMatcher(stops, include=spec.include_stop),
            one_call=not spec.parallel_tool_calls,
            stop_tokens=spec.stop_token_ids if spec.include_stop else frozenset(),
            keep_ids=spec.token_ids,
            silent=spec.max_tokens == 0,
        )

    def _request(self, prepared: Prepared, prompt: Prompt, grammar: GrammarSpec | None) -> Request:
        """Return the request of a prompt's first choice."""
        spec, tokens = prepared.spec, prompt.tokens
        room = self._client.info.context_length - len(tokens)
        asked = spec.max_tokens if spec.max_tokens is not None else self._default_max_tokens
        max_tokens = room if asked is None else min(asked, room)
        if spec.min_tokens > max_tokens:
            raise RequestError(
                f"'min_tokens' is {spec.min_tokens}, but the answer has at most {max_tokens}.",
                param="min_tokens",
                code="invalid_value",
            )
        eos = self._tokenizer.eos_ids
        message_ends = [i + 1 for i, token in enumerate(tokens) if token in eos]
        constraints = self._constraints.for_prompt(prepared, tokens, grammar, max_tokens=max_tokens)
        return Request(
            id=_id_of(0),
            prompt=tokens,
            media=prompt.media,
            sampling=spec.sampling,
            max_tokens=max(max_tokens, 1),  # the engine knows no less; see `OutputStream`
            min_tokens=spec.min_tokens,
            stop_token_ids=spec.stop_token_ids if spec.ignore_eos else spec.stop_token_ids | eos,
            kv_format=spec.kv_format,
            grammar=constraints.grammar,
            thinking=constraints.thinking,
            stop_on_loop=spec.stop_on_loop,
            rules=spec.rules,
            adapter=spec.adapter,
            caller=spec.caller,
            share=spec.share,
            priority=spec.priority or 0,
            session=spec.session,
            cache_salt=spec.cache_salt,
            snapshots=tuple(message_ends[-_KEPT_SNAPSHOTS:]),
            deadline_s=self._deadline_s,
            speculation=spec.speculation,
            prediction=self._predicted(spec.prediction[:_MOST_PREDICTED], max_tokens),
            hold=spec.hold,
        )

    def _predicted(self, text: str, max_tokens: int) -> tuple[int, ...]:
        """Return the tokens of the client's expected answer (`prediction`)."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False) if text else ()
        return tuple(tokens[:max_tokens])


def _choice_of(request: Request, index: int) -> Request:
    """Return a first choice's request as that of choice `index`."""
    sampling = request.sampling
    sampling = changed(sampling, seed=derived_seed(sampling.seed, index))
    return changed(request, id=_id_of(index), sampling=sampling)


def _id_of(index: int) -> str:
    return f"{new_id()}-{index}"


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of a generation's choice `index`; the first one's is the seed itself."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63

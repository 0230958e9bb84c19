"""The constraints of an answer: its grammar, and the limit on its reasoning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from quire.core.errors import RequestError
from quire.core.request import GrammarSpec, ThinkingBudget
from quire.serving.answer_grammar import AnswerGrammar, GrammarRequest
from quire.serving.generation import Generation, Prepared, Thinking
from quire.serving.prompts import THINKING_VARIABLES, Prompts
from quire.serving.sandbox import GrammarSandbox
from quire.text.dialects.base import Dialect, Vocabulary

log = logging.getLogger("quire.service")

_EFFORT_SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.9, "max": 0.9}


@dataclass(frozen=True, slots=True)
class AnswerConstraints:
    """The constraints of the answers to one prompt."""

    grammar: GrammarSpec | None
    thinking: ThinkingBudget | None


class Constraints:
    """Makes the constraints of one model's answers.

    Args:
        vocabulary: the tokenizer's vocabulary, as dialects see it.
        sandbox: compiles grammars in a process of its own.
    """

    def __init__(
        self, dialect: Dialect, vocabulary: Vocabulary, prompts: Prompts, sandbox: GrammarSandbox
    ) -> None:
        self._dialect = dialect
        self._vocabulary = vocabulary
        self._prompts = prompts
        self._sandbox = sandbox

    @property
    def can_think(self) -> bool:
        """Whether the model's template or dialect supports reasoning."""
        known = THINKING_VARIABLES | {"reasoning_effort"}
        return self.can_limit_reasoning or bool(known & self._prompts.template.variables)

    @property
    def can_limit_reasoning(self) -> bool:
        """Whether the end of reasoning can be forced."""
        return self._dialect.reasoning is not None

    async def close(self) -> None:
        """End the process that compiles grammars. May be called again."""
        await self._sandbox.close()

    def bind(self, prepared: Prepared) -> bool:
        """Return whether a grammar constrains the answer."""
        spec = prepared.spec
        return bool(spec.format is not None or spec.tool_choice.forced or spec.strict_tools)

    async def build(self, prepared: Prepared) -> AnswerGrammar:
        """Compile the grammar of the answer once, so that a bad schema is a 400.

        Raises:
            RequestError: it cannot be compiled, or it accepts no answer with the given start (code
                `NO_BEGINNING`).
        """
        if not self.bind(prepared):
            return AnswerGrammar(grammar=None)
        spec = prepared.spec
        request = GrammarRequest(
            format=spec.format,
            tools=spec.offered_tools,
            strict=spec.strict_tools,
            forced=spec.tool_choice.forced,
            name=spec.tool_choice.name,
            parallel=spec.parallel_tool_calls,
            parameters_field=spec.names.parameters,
            bare=prepared.bare or spec.continue_final,
            started=prepared.started,
        )
        built = await self._sandbox.build(request, spec.caller)
        if built.unenforced:
            log.info("schema keywords not enforced: %s", "; ".join(built.unenforced))
        return built

    def for_prompt(
        self,
        prepared: Prepared,
        prompt: Sequence[int],
        grammar: GrammarSpec | None,
        max_tokens: int,
    ) -> AnswerConstraints:
        """Return the constraints of the answers to a prompt.

        Args:
            grammar: result of `build`.
            max_tokens: the most tokens of the answer.

        Raises:
            RequestError: the request sets a reasoning limit that cannot be enforced on this model.
        """
        spec = prepared.spec
        if prepared.bare or (grammar is None and spec.thinking == Thinking()):
            return AnswerConstraints(grammar, thinking=None)
        thinks = self._thinks_at_once(prompt)
        return AnswerConstraints(
            None if grammar is None else self._after_reasoning(spec, grammar, thinks),
            self._budget(spec, max_tokens, thinks, has_grammar=grammar is not None),
        )

    def _thinks_at_once(self, prompt: Sequence[int]) -> bool:
        """Return whether the prompt ends within open reasoning."""
        return self._dialect.parser(prompt, (), self._vocabulary).thinking is True

    def _may_think(self, spec: Generation) -> bool:
        """Return whether the answer may contain reasoning: by the request, or else by the
        template's default.
        """
        if spec.thinking.enabled is not None:
            return spec.thinking.enabled
        for name in THINKING_VARIABLES & spec.template_kwargs.keys():
            return bool(spec.template_kwargs[name])
        return self._thinks_by_default

    @cached_property
    def _thinks_by_default(self) -> bool:
        """Whether the model always reasons: asking for reasoning does not change its prompt."""
        probe = Generation(messages=({"role": "user", "content": "?"},))
        asked = replace(probe, thinking=Thinking(enabled=True))
        return self._prompts.render(probe) == self._prompts.render(asked)

    def _after_reasoning(
        self, spec: Generation, grammar: GrammarSpec, thinks_at_once: bool
    ) -> GrammarSpec:
        """Return the grammar to apply after reasoning, whether already open or opened by
        the model.
        """
        marks = self._dialect.thinking(self._vocabulary)
        if grammar.lazy or self._dialect.frame is not None:
            return grammar
        if spec.continue_final and not thinks_at_once:
            return grammar  # within the answer no reasoning is opened
        if marks is None or not (thinks_at_once or self._may_think(spec)):
            return grammar
        opening, closing = marks
        return replace(grammar, start_after=closing, opened_by=() if thinks_at_once else opening)

    def _budget(
        self, spec: Generation, max_tokens: int, thinks_at_once: bool, *, has_grammar: bool
    ) -> ThinkingBudget | None:
        """Return the limit on reasoning, so that tokens are left for the answer.

        A model that reasons whatever the template says gets a budget of none if reasoning is off.
        """
        marks, thinking = self._dialect.thinking(self._vocabulary), spec.thinking
        budget = thinking.budget
        if budget is None and thinking.effort is not None:
            budget = int(max_tokens * _EFFORT_SHARES[thinking.effort])
        if budget is None and thinking.enabled is False and thinks_at_once:
            budget = 0
        if budget is None:
            return None
        if marks is None:
            if thinking.budget is None:
                return None
            raise RequestError(
                "A thinking budget is not supported: this model does not mark its reasoning.",
                param="thinking_budget",
                code="unsupported_parameter",
            )
        opening, closing = marks
        if has_grammar and self._dialect.frame is not None:
            closing = self._vocabulary.ids_of(self._dialect.frame.reasoning_end)
        return ThinkingBudget(budget, () if thinks_at_once else opening, closing)

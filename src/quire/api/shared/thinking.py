"""Reasoning fields of OpenAI's protocols, and their translation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from starlette.types import Scope

from quire.api.shared.access import note_ignored
from quire.api.shared.numbers import Integer
from quire.api.shared.schema import UnlessEmpty, Wire
from quire.core.errors import RequestError
from quire.serving.generation import Thinking
from quire.serving.messages import JsonObject
from quire.serving.prompts import RESERVED_VARIABLES, THINKING_VARIABLES
from quire.serving.service import Service

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingSwitch(Wire):
    """The field `thinking` of DeepSeek, GLM and Kimi."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Integer | None = Field(default=None, ge=0, lt=2**31)
    clear_thinking: bool | None = None


class ReasoningOptions(Wire):
    """OpenRouter's field `reasoning`."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Integer | None = Field(default=None, ge=0, lt=2**31)
    exclude: bool | None = None


_NO_SWITCH, _NO_OPTIONS = ThinkingSwitch(type="auto"), ReasoningOptions()


class ThinkingFields(Wire):
    """Fields that request reasoning; the first one that sets it on or off decides."""

    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    reasoning: ReasoningOptions | None = None
    think: bool | Effort | None = None
    reasoning_effort: Annotated[Effort | None, UnlessEmpty] = None
    thinking_budget: Integer | None = Field(default=None, ge=0, lt=2**31)
    include_reasoning: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    @property
    def shows_reasoning(self) -> bool:
        """Whether the client gets the reasoning, if there is any."""
        excluded = self.reasoning is not None and self.reasoning.exclude is True
        return self.include_reasoning is not False and not excluded

    def wanted(self) -> tuple[Thinking, str]:
        """Return the requested reasoning effort and the field that set it."""
        switch, options = self.thinking or _NO_SWITCH, self.reasoning or _NO_OPTIONS
        think = None if isinstance(self.think, bool) else self.think
        efforts = (self.reasoning_effort, options.effort, think)
        effort = next((each for each in efforts if each is not None), None)
        said: tuple[tuple[str, bool | None], ...] = (
            ("enable_thinking", self.enable_thinking),
            ("thinking", None if switch.type == "auto" else switch.type != "disabled"),
            ("reasoning", options.enabled),
            ("think", self.think if isinstance(self.think, bool) else None),
            ("reasoning_effort", None if effort is None else effort != "none"),
        )
        param, enabled = next(
            ((name, value) for name, value in said if value is not None), ("thinking_budget", None)
        )
        budgets = (self.thinking_budget, switch.budget_tokens, options.max_tokens)
        budget = next((each for each in budgets if each is not None), None)
        return Thinking(enabled, budget, None if effort == "none" else effort), param


def offered(service: Service, scope: Scope, thinking: Thinking, param: str) -> Thinking:
    """Return `thinking` if the model supports it, else none, and tell the client."""
    if thinking.enabled and not service.constraints.can_think:
        note_ignored(scope, [param])
        return Thinking()
    return thinking


def template_variables(
    service: Service, scope: Scope, given: Mapping[str, object] | None
) -> dict[str, object]:
    """Return variables for the template. The client is told of those that the template ignores.

    Raises:
        RequestError: a variable is set by the server.
    """
    variables = dict(given or {})
    for name in RESERVED_VARIABLES & variables.keys():
        raise RequestError(
            f"'chat_template_kwargs.{name}' is set by the server: leave it out.",
            param=f"chat_template_kwargs.{name}",
            code="unknown_parameter",
        )
    unread = variables.keys() - service.template.variables - THINKING_VARIABLES
    note_ignored(scope, [f"chat_template_kwargs.{name}" for name in sorted(unread)])
    return variables

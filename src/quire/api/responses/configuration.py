"""The reasoning and the text format of an answer, and items that change them on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from quire.api.shared.formats import any_object
from quire.api.shared.pieces import compact
from quire.api.shared.schema import History, Verbosity, Wire
from quire.api.shared.thinking import Effort
from quire.core.errors import RequestError
from quire.serving.answer_grammar import AnswerFormat
from quire.serving.messages import JsonObject


class TextFormat(Wire):
    """The format of the answer. `schema` belongs to `json_schema`, and is always met."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Wire):
    """Settings of the answer's text. There is no verbosity setting: the response says `medium`."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class Reasoning(Wire):
    """How to reason. The chat template decides which earlier reasoning the model sees (`auto`)."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ConfigurationUpdateItem(History):
    """Settings of all answers from here on, until a later item of this kind changes them again.

    They hold in place of the request's own, which a client keeps as they are for a stable prompt.
    """

    type: Literal["configuration_update"]
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    id: str | None = None

    def without_effect(self) -> list[str]:
        """Return the settings that change no answer here: only its effort and its format do."""
        reasoning, text = self.reasoning or Reasoning(), self.text or TextConfig()
        given = {
            "reasoning.summary": reasoning.summary or reasoning.generate_summary,
            "text.verbosity": text.verbosity not in (None, "medium"),
        }
        return [name for name, value in given.items() if value]


@dataclass(frozen=True, slots=True)
class Configuration:
    """The reasoning effort and the text format of an answer, with the fields that set them."""

    effort: Effort | None
    effort_field: str
    text: TextFormat | None
    text_field: str = "text.format"

    def updated(self, item: ConfigurationUpdateItem, param: str) -> Configuration:
        """Return the configuration after an item, which errors call `param`."""
        effort, effort_field = self.effort, self.effort_field
        text, text_field = self.text, self.text_field
        if item.reasoning is not None and "effort" in item.reasoning.model_fields_set:
            effort, effort_field = item.reasoning.effort, f"{param}.reasoning.effort"
        if item.text is not None and item.text.format is not None:
            text, text_field = item.text.format, f"{param}.text.format"
        return Configuration(effort, effort_field, text, text_field=text_field)

    def answer_format(self) -> AnswerFormat | None:
        """Return the format that constrains the answer, if any."""
        match self.text:
            case TextFormat(type="json_object"):
                return any_object(self.text_field)
            case TextFormat(type="json_schema", schema_=schema, strict=strict):
                if schema is None:
                    raise RequestError(
                        f"Missing required parameter: '{self.text_field}.schema'.",
                        param=f"{self.text_field}.schema",
                        code="missing_required_parameter",
                    )
                source = compact(schema).decode()
                return AnswerFormat("json_schema", source, self.text_field, strict=strict is True)
            case _:
                return None

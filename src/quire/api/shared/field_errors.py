"""Errors that name the field at fault and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from quire.api.shared import foreign
from quire.api.shared.field_names import field_name
from quire.core.complaints import complaint
from quire.core.errors import RequestError
from quire.media.kinds import Protocols, kinds_by

_LONGEST_NAME = 256  # characters of an unknown field's name that its refusal repeats
REGISTERED = "@registered."
"""Prefix of union tags for registered media kinds; the name of a field of `MediaInput` follows."""
_HOSTED = "@hosted"
"""Union tag that all tools of the protocols' own servers share."""


@dataclass(frozen=True, slots=True)
class Generating:
    """The generating endpoint whose prompts another endpoint only counts.

    Attributes:
        schema: schema of its bodies. Fields that only this schema has do not change a prompt, or
            are not offered.
    """

    path: str
    schema: type[BaseModel]


def first_of(error: ValidationError) -> Sequence[ErrorDetails]:
    """Return the errors of the first field that has any, of a union's members one each. A missing
    field's come only if there is no other.

    The error of a wrong field says more than that of the field it replaced.
    """
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda each: each["type"] == "missing")
    return [first, *(each for each in errors if each is not first and _same_field(each, first))]


def _same_field(one: ErrorDetails, other: ErrorDetails) -> bool:
    return field_name(one["loc"]) == field_name(other["loc"])


def unknown_field(
    model: type[BaseModel], path: str, generating: Generating | None, *, generates: bool
) -> RequestError:
    """Return the refusal of a field that neither the schema nor another server has.

    Args:
        generates: whether the endpoint generates.
    """
    if generating is not None and (refused := _of_generating(generating, path)):
        return refused
    meant = foreign.nearest(path, model.model_fields, generates=generates)
    hint = "" if meant is None else f" Did you mean '{meant}'?"
    shown = path if len(path) <= _LONGEST_NAME else f"{path[:_LONGEST_NAME]}..."
    return RequestError(
        f"Unknown parameter: '{shown}'.{hint}", param=shown, code="unknown_parameter"
    )


def binding_field(path: str) -> RequestError:
    """Return the refusal of a field of other servers that an answer may not ignore."""
    return RequestError(
        f"'{path}' is not offered by this server, and ignoring it would change the answer: leave "
        "it out.",
        param=path,
        code="unsupported_parameter",
    )


def _of_generating(generating: Generating, name: str) -> RequestError | None:
    """Return the refusal of a field that only the generating endpoint has; None for other
    fields.
    """
    fields = generating.schema.model_fields
    own = next(iter(foreign.renamed({name: True}, fields)), name)
    if own not in fields:
        return None
    if fields[own].annotation is NoneType:
        return _not_offered(generating.schema, (own,), name)
    return RequestError(
        f"'{name}' is a field of {generating.path}: it does not change the count, leave it out.",
        param=name,
        code="unknown_parameter",
    )


def _not_offered(model: type[BaseModel], loc: tuple[int | str, ...], param: str) -> RequestError:
    """Return the refusal of a field that the schema has with type `None`."""
    return RequestError(
        f"'{param}' is not offered by this server{_hint(model, loc)}.",
        param=param,
        code="unsupported_parameter",
    )


_CODES = {
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "greater_than": "below_min_value",
    "greater_than_equal": "below_min_value",
    "less_than": "above_max_value",
    "less_than_equal": "above_max_value",
    "too_long": "array_above_max_length",
    "too_short": "array_below_min_length",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    "literal_error": "invalid_value",
    "string_pattern_mismatch": "invalid_value",
    "union_tag_invalid": "invalid_value",
    "value_error": "invalid_value",
}


def explain(
    model: type[BaseModel], details: Sequence[ErrorDetails], names: Mapping[str, str]
) -> RequestError:
    """Return the validation errors of one field as a sentence that names it and its limit.

    Args:
        details: as `first_of` returns them.
        names: the client's name of each field that it gave under another name.
    """
    detail = details[0]
    first, *rest = detail["loc"] or ("",)
    kind, param = detail["type"], field_name((names.get(str(first), first), *rest))
    code = _CODES.get(kind, "invalid_type")
    match kind:
        case "missing":
            message = f"Missing required parameter: '{param}'."
        case "none_required":
            return _not_offered(model, detail["loc"], param)
        case "union_tag_invalid":
            context = detail["ctx"]
            param = f"{param}.{_tag_field(context)}"
            known = ", ".join(_types(str(context["expected_tags"])))
            tag = str(context["tag"]).removeprefix("@")
            message = f"Invalid value for '{param}': '{tag}'. Known here: {known}."
        case "union_tag_not_found" if not isinstance(detail["input"], dict):
            tag, code = _tag_field(detail["ctx"]), "invalid_type"
            message = f"Invalid value for '{param}': must be an object with a '{tag}'."
        case "union_tag_not_found":
            param = f"{param}.{_tag_field(detail['ctx'])}"
            message = f"Missing required parameter: '{param}'."
        case "string_type" if detail["loc"][-1] == "@text":
            message = f"Invalid value for '{param}': must be a string or a list."
        case "value_error":
            message = f"Invalid value for '{param}': {detail['ctx']['error']}."
        case _:
            message = f"Invalid value for '{param}': {complaint(details)}."
    return RequestError(message, param=param, code=code)


def _types(tags: str) -> Iterator[str]:
    """Return the type names of a union's members, including those of media kinds.

    A tag that ends with `_` stands for all types that begin so; hosted tools have no effect, and
    are left out.
    """
    for tag in re.findall(r"@[\w.-]+", tags):
        registered = tag.removeprefix(REGISTERED)
        if registered != tag:
            yield from kinds_by(cast(Protocols, registered))
        elif tag != _HOSTED:
            yield f"{tag[1:]}*" if tag.endswith("_") else tag[1:]


def _tag_field(context: dict[str, object]) -> str:
    """Return the field that tells a union's members apart, from the name of the function that reads
    it.
    """
    return "role" if "role" in str(context["discriminator"]) else "type"


def _hint(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Return a hint for a refused field: its description in the schema, if it has one."""
    field = model.model_fields.get(str(loc[0])) if len(loc) == 1 else None
    return f": {field.description}" if field is not None and field.description else ""

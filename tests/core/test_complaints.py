"""What must hold of a refused value is said in plain words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from quire.core.complaints import complaint


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (int, "abc", "must be a whole number, not 'abc'"),
        (int, 1.5, "must be a whole number, not 1.5"),
        (float, "x" * 1000, "must be a number"),
        (bool, "perhaps", "must be true or false, not 'perhaps'"),
        (str, None, "must be a string, not null"),
        (list[int], {}, "must be a list, not an object"),
        (dict[str, int], [], "must be an object, not a list"),
        (float | str, [], "must be a number or a string, not a list"),
        (Literal["low", "high"], True, "must be 'low' or 'high', not true"),
        (Annotated[int, Field(ge=1)], -5, "must be at least 1, not -5"),
        (Annotated[int, Field(gt=0)], 0, "must be more than 0, not 0"),
        (Annotated[int, Field(lt=2**31)], 2**31, "must be less than 2,147,483,648, not 2147483648"),
        (Annotated[float, Field(le=0.25)], 1.0, "must be at most 0.25, not 1.0"),
        (Annotated[float, Field(le=2000.0)], 2e5, "must be at most 2,000, not 200000.0"),
        (Annotated[float, Field(le=3.4e38)], 1e39, "must be at most 3.4e38, not 1e+39"),
        (Annotated[float, Field(allow_inf_nan=False)], float("nan"), "must be a finite number"),
        (Annotated[list[int], Field(min_length=1)], [], "must not be empty"),
        (Annotated[list[int], Field(min_length=2)], [1], "must have at least 2 entries"),
        (Annotated[list[int], Field(max_length=1)], [1, 2], "must have at most 1 entry"),
        (Annotated[str, Field(min_length=1)], "", "must not be empty"),
        (Annotated[str, Field(max_length=3)], "abcd", "must have at most 3 characters"),
        (Annotated[str, Field(pattern="^[a-z]+$")], "A", "must be text of the pattern ^[a-z]+$"),
    ],
)
def test_a_rule_is_said_in_plain_words(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(value)
    assert complaint(refused.value.errors()).startswith(said)

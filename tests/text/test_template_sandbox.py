"""The sandbox of templates allows what jinja's allows, and asks jinja once for each type."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.text.template_sandbox import TemplateSandbox

OBJECTS = ("text", [1], {"a": 1}, {1}, Namespace(a=1), len, int, (x for x in ()), print)
NAMES = ("a", "append", "strip", "pop", "items", "__class__", "_a", "mro", "gi_frame", "format")


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", NAMES)
def test_attributes_are_as_safe_as_in_jinja(value: Any, name: str) -> None:
    sandbox, own = TemplateSandbox(), ImmutableSandboxedEnvironment()
    safe = own.is_safe_attribute(value, name, None)
    assert [sandbox.is_safe_attribute(value, name, None) for _ in range(2)] == [safe, safe]


def test_jinja_is_asked_once_for_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    judge = ImmutableSandboxedEnvironment.is_safe_attribute

    def noted(self: Any, obj: Any, attr: str, value: Any) -> bool:
        asked.append(attr)
        return judge(self, obj, attr, value)

    monkeypatch.setattr(ImmutableSandboxedEnvironment, "is_safe_attribute", noted)
    template = TemplateSandbox().from_string("{{ a.strip() }}{{ b.strip() }}{{ a.upper() }}")
    assert template.render(a=" x ", b=" y ") == "xy X "
    assert asked == ["strip", "upper"]

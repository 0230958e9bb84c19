"""The sandbox of chat templates: jinja's own, which judges an attribute of a type only once."""

from __future__ import annotations

from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

_JUDGED = 1024
"""Most attributes whose judgement is kept; a template may name any number of them."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox of values that cannot be changed.

    Whether an attribute is safe depends on its name and on the type of its object. Jinja asks
    abstract base classes each time, which is a third of the work of a short conversation.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._judged: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        asked = type(obj), attr
        safe = self._judged.get(asked)
        if safe is None:
            safe = super().is_safe_attribute(obj, attr, value)
            if len(self._judged) < _JUDGED:
                self._judged[asked] = safe
        return safe

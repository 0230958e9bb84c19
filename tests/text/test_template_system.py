"""System messages after the first, in templates that refuse or drop them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.demo import MODEL_DIR
from quire.text.template import ChatTemplate

ONE_TURN = "<{{ message.role }}>{{ message.content }}"
ANYWHERE = "{% for message in messages %}" + ONE_TURN + "{% endfor %}"
FIRST_ONLY = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + ONE_TURN
    + "{% endfor %}"
)
DROPPED = (
    "{% for message in messages %}{% if message.role != 'system' or loop.first %}"
    + ONE_TURN
    + "{% endif %}{% endfor %}"
)
IN_TURNS = (
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for message in turns %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}{% endfor %}" + ANYWHERE
)
NONE = FIRST_ONLY.replace("and not loop.first ", "")


TOKENS = {"bos_token": "", "eos_token": ""}


def said(*messages: str) -> list[dict[str, Any]]:
    """Return messages spelled as `role text`."""
    pairs = (each.partition(" ") for each in messages)
    return [{"role": role, "content": text} for role, _, text in pairs]


def rendered(source: str, *messages: str) -> str:
    return ChatTemplate({"default": source}, {}).render(said(*messages))


REMINDER = "<system-reminder>\nc\n</system-reminder>"


@pytest.mark.parametrize(
    ("source", "leading", "later", "first", "last"),
    [
        (ANYWHERE, "<system>a<system>b", "<system>c", "<user>d", "<user>f"),
        (FIRST_ONLY, "<system>a\n\nb", f"<user>{REMINDER}", "<user>d", "<user>f"),
        (DROPPED, "<system>a\n\nb", f"<user>{REMINDER}", "<user>d", "<user>f"),
        (IN_TURNS, "<system>a\n\nb", f"\n\n{REMINDER}", "<user>d", "<user>f"),
    ],
)
def test_all_system_messages_are_shown_where_they_stand(
    source: str, leading: str, later: str, first: str, last: str
) -> None:
    start = ("system a", "system b", "user d")
    assert rendered(source, *start, "system c") == leading + first + later
    whole = rendered(source, *start, "system c", "assistant e", "user f")
    assert whole == leading + first + later + "<assistant>e" + last
    after = rendered(source, *start, "assistant e", "system c", "user f")
    if source is IN_TURNS:
        assert after == f"{leading}{first}<assistant>e<user>{REMINDER}\n\nf"
    else:
        assert after == f"{leading}{first}<assistant>e{later}{last}"


@pytest.mark.parametrize("source", [NONE, IN_TURNS.replace(ANYWHERE, NONE)])
def test_a_template_without_system_messages_reads_them_in_the_users(source: str) -> None:
    given = rendered(source, "system a", "system b", "user d", "assistant e", "system c", "user f")
    assert given.startswith("<user>a\n\nb\n\nd<assistant>e")
    assert REMINDER in given
    assert rendered(source, "system a") == "<user>a"
    assert rendered(source, "user d") == "<user>d"


def test_several_reminders_in_a_row_are_all_shown() -> None:
    text = rendered(IN_TURNS, "user a", "assistant b", "system c", "system c", "user d")
    assert text == f"<user>a<assistant>b<user>{REMINDER}\n\n{REMINDER}\n\nd"


def test_parts_stay_parts() -> None:
    parts = [{"type": "text", "text": "c"}]
    messages = [*said("system a", "user d"), {"role": "system", "content": parts}]
    text = ChatTemplate({"default": FIRST_ONLY}, {}).render(messages)
    assert text == f"<system>a<user>d<user>{REMINDER}"


def test_the_templates_of_this_project_show_them(tmp_path: Path) -> None:
    folder = Path(__file__).parent / "templates"
    sources = [path.read_text() for path in sorted(folder.glob("*.jinja"))]
    templates = [
        ChatTemplate.open(MODEL_DIR, TOKENS),
        *(ChatTemplate({"default": each}, TOKENS) for each in sources),
    ]
    for template in templates:
        for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
            messages = said(
                "system aa", "system bb", "user dd", "system cc", "assistant ee", "user ff"
            )
            text = template.render(messages, tools=tools)
            assert all(each in text for each in ("aa", "bb", "cc", "dd", "ee", "ff"))
            assert text.index("dd") < text.index("cc") < text.index("ee")

"""The shapes are those that Claude Code sends; the near misses are what people write about them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.text.volatile import drop_from_messages, drop_from_system

HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
COUNTDOWN = "<total_tokens>14999841 tokens left</total_tokens>"
WRAPPED = f"<system-reminder>\n{COUNTDOWN}\n</system-reminder>"
PROMPT = "You are Claude Code, Anthropic's official CLI for Claude."
SHAPES = [COUNTDOWN, WRAPPED]


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


ASK, SAY = user("List the files."), {"role": "assistant", "content": "Here they are."}


class TestSystem:
    @pytest.mark.parametrize(
        "header",
        [
            HEADER,
            "x-anthropic-billing-header: cc_version=9.9.9; cc_entrypoint=cli;",
            "x-anthropic-billing-header: cc_version=2.1.15; cc_entrypoint=cli",
            "x-anthropic-billing-header: cc_version=2.1.36.fbe; cch=00000; cc_workload=cron;",
        ],
    )
    def test_the_header_block_goes(self, header: str) -> None:
        prompt = text(PROMPT, cache_control={"type": "ephemeral"})
        assert drop_from_system([text(header), prompt]) == [prompt]

    def test_the_header_line_goes(self) -> None:
        assert drop_from_system(f"{HEADER}\n\n{PROMPT}\nMore.") == f"{PROMPT}\nMore."
        assert drop_from_system([text(f"{HEADER}\n{PROMPT}")]) == [text(PROMPT)]
        assert drop_from_system(HEADER) == ""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_countdown_goes_wherever_it_is_a_paragraph(self, shape: str) -> None:
        assert drop_from_system([text(PROMPT), text(shape)]) == [text(PROMPT)]
        assert drop_from_system(f"{PROMPT}\n\n{shape}\n\ngitStatus: clean") == (
            f"{PROMPT}\n\ngitStatus: clean"
        )
        assert drop_from_system(f"{shape}\n\n{PROMPT}") == PROMPT
        assert drop_from_system(f"{PROMPT}\n\n{shape}") == PROMPT

    @pytest.mark.parametrize(
        "near_miss",
        [
            f"{PROMPT}\n{HEADER}",
            f" {HEADER}\n{PROMPT}",
            f"{HEADER} {PROMPT}",
            f"> {HEADER}",
            "x-anthropic-billing-header: is sent with every request.",
            "x-anthropic-billing-header:",
            "x-anthropic-other-header: cc_version=2.1.177.01c;",
            "X-Anthropic-Billing-Header: cc_version=2.1.177.01c;",
            f"The text {COUNTDOWN} is in here.",
            f"Example:\n{COUNTDOWN}\nEnd.",
            "<total_tokens>N tokens left</total_tokens>",
            "<total_tokens>5 tokens left</total_tokens>.",
            "<total_tokens>5 tokens</total_tokens>",
            "<total_tokens> 5 tokens left</total_tokens>",
            f"<system-reminder>\nBe brief.\n{COUNTDOWN}\n</system-reminder>",
            "",
        ],
    )
    def test_what_only_looks_like_it_stays(self, near_miss: str) -> None:
        assert drop_from_system(near_miss) == near_miss
        assert drop_from_system([text(near_miss)]) == [text(near_miss)]

    def test_a_header_that_is_not_first_stays(self) -> None:
        blocks = [text(PROMPT), text(HEADER)]
        assert drop_from_system(blocks) == blocks


class TestMessages:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_countdown_of_its_own_goes(self, shape: str) -> None:
        for content in (shape, [text(shape)], f"\n{shape}\n"):
            for role in ("system", "user"):
                messages = [ASK, SAY, ASK, {"role": role, "content": content}]
                assert drop_from_messages(messages) == [ASK, SAY, ASK]

    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_countdown_behind_a_text_goes(self, shape: str) -> None:
        assert drop_from_messages([user(f"{ASK['content']}\n\n{shape}")]) == [ASK]
        assert drop_from_messages([user(f"{ASK['content']}\n\n{shape}\n\n{shape}")]) == [ASK]
        assert drop_from_messages([user([text("Go on."), text(shape)])]) == [user([text("Go on.")])]

    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_countdown_behind_a_tool_result_goes(self, shape: str) -> None:
        def result(content: Any) -> dict[str, Any]:
            return user([{"type": "tool_result", "tool_use_id": "t1", "content": content}])

        tail = f"\n\n{shape}"
        assert drop_from_messages([ASK, result(f"a.py{tail}")]) == [ASK, result("a.py")]
        blocks = [text("a.py"), text(shape)]
        assert drop_from_messages([ASK, result(blocks)]) == [ASK, result([text("a.py")])]
        tool = {"role": "tool", "tool_call_id": "t1"}
        assert drop_from_messages([ASK, {**tool, "content": f"a.py{tail}"}]) == [
            ASK,
            {**tool, "content": "a.py"},
        ]

    @pytest.mark.timeout(60)
    def test_linear_in_a_text_that_is_nothing_but_near_misses(self) -> None:
        near_miss = user(f"\n\n{COUNTDOWN}" * 50_000 + "x")
        assert drop_from_messages([near_miss]) == [near_miss]
        assert len(drop_from_messages([user("x" + f"\n\n{COUNTDOWN}" * 50_000)])[0]["content"]) == 1

    def test_a_tool_message_stays_even_when_nothing_is_left(self) -> None:
        tool = {"role": "tool", "tool_call_id": "t1", "content": COUNTDOWN}
        assert drop_from_messages([ASK, tool]) == [ASK, {**tool, "content": ""}]

    def test_the_header_goes_from_a_leading_system_message(self) -> None:
        system = {"role": "system", "content": f"{HEADER}\n{PROMPT}"}
        assert drop_from_messages([system, ASK]) == [{"role": "system", "content": PROMPT}, ASK]
        blocks = {"role": "system", "content": [text(HEADER), text(PROMPT)]}
        kept = {"role": "system", "content": [text(PROMPT)]}
        assert drop_from_messages([blocks, ASK]) == [kept, ASK]
        assert drop_from_messages([{"role": "system", "content": HEADER}, ASK]) == [ASK]

    @pytest.mark.parametrize(
        "message",
        [
            user(f"What does {COUNTDOWN} mean?"),
            user(f"What is this?\n{COUNTDOWN}"),
            user(f"```\n\n{COUNTDOWN}\n\n```"),
            user(f"{COUNTDOWN} Why?"),
            user(f"{HEADER}\nWhat is this?"),
            user(HEADER),
            user(COUNTDOWN),
            user([text(f"It says {COUNTDOWN}"), {"type": "image", "source": {}}]),
            user([{"type": "tool_result", "tool_use_id": "t", "content": f"grep: {COUNTDOWN}"}]),
            user([{"type": "tool_result", "tool_use_id": "t"}]),
            user([text("")]),
            user(""),
            {"role": "assistant", "content": f"You wrote:\n\n{COUNTDOWN}"},
            {"role": "assistant", "content": [text(COUNTDOWN)]},
            {"role": "assistant", "content": None, "tool_calls": []},
        ],
    )
    def test_what_only_looks_like_it_stays(self, message: dict[str, Any]) -> None:
        kept = drop_from_messages([message])
        assert kept == [message]
        assert kept[0] is message

    def test_prompts_that_only_look_different_are_the_same_after_it(self) -> None:
        def prompt(turn: int) -> list[Any]:
            header = HEADER.replace("36ee5", f"{turn:05x}")
            left = f"<total_tokens>{15_000_000 - turn} tokens left</total_tokens>"
            return drop_from_messages(
                [
                    {"role": "system", "content": [text(header), text(PROMPT)]},
                    user([text("Go."), text(left)]),
                    SAY,
                    {"role": "system", "content": left},
                ]
            )

        assert prompt(1) == prompt(2)
        assert len(prompt(1)) == 3

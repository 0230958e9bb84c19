from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.core.errors import ModelError, RequestError
from quire.text.template import ChatTemplate, NotContinued
from quire.text.template_calls import ContentForms
from tests.text.conversations import CALL, CONVERSATIONS, RESULT, TEMPLATES, TOOL, USER

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HI = [{"role": "user", "content": "hi"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL)


def test_the_grammar_of_a_tool_conversation() -> None:
    text = template(TEMPLATES["gemma4"]).render(
        [{"role": "user", "content": "hi"}, CALL, RESULT], tools=[TOOL], enable_thinking=True
    )
    head, tail = text.split("<turn|>\n", 1)
    assert head.startswith("<s><|turn>system\n<|think|><|tool>declaration:get_weather{")
    assert tail == (
        "<|turn>user\nhi<turn|>\n<|turn>model\n"
        '<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>'
        '<|tool_response>response:get_weather{value:<|"|>rain<|"|>}<tool_response|>'
    )


def test_the_generation_prompt_may_close_reasoning() -> None:
    qwen = template(TEMPLATES["qwen3"])
    assert qwen.render(HI).endswith("<|im_start|>assistant\n")
    assert qwen.render(HI, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert not qwen.render(HI, add_generation_prompt=False).endswith("assistant\n")


def test_what_the_template_refuses_is_a_request_error() -> None:
    mistral = template(TEMPLATES["mistral"])
    with pytest.raises(RequestError, match="user and assistant must take turns") as refused:
        mistral.render([USER, USER])
    assert (refused.value.param, refused.value.status) == ("messages", 400)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ 1 // 0 }}",
    ],
)
def test_whatever_a_template_raises_ends_that_request_alone(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses") as refused:
        template(source).render(HI)
    assert refused.value.code == "chat_template_error"


def test_the_callers_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": None, "reasoning": "x"}]
    template("{{ messages[0] }}").render(messages)
    assert messages == [{"role": "user", "content": None, "reasoning": "x"}]


def test_a_broken_template_is_refused_when_the_model_is_opened() -> None:
    with pytest.raises(ModelError, match="chat template 'default', line 2"):
        template("a\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "{% for each in messages %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_a_template_that_is_nested_too_deeply_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match="nested too deeply"):
        template(source)


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("{{ 'user: ' + messages[0]['content'] }}", ContentForms(True, False)),  # cannot add a list
        ("{{ messages[0]['content'] }}", ContentForms(True, False)),  # a list would be written out
        (
            "{% for part in messages[0]['content'] | selectattr('type', 'equalto', 'text') %}"
            "{{ part.text }}{% endfor %}",  # of a string's letters none is a part
            ContentForms(False, True),
        ),
        ("{{ raise_exception('two, please') if messages | length < 2 }}", ContentForms(True, True)),
        (TEMPLATES["gemma4"], ContentForms(True, True)),
        (TEMPLATES["qwen3"], ContentForms(True, False)),
    ],
)
def test_what_a_template_reads(source: str, read: ContentForms) -> None:
    assert template(source).content_forms("user") == read


def test_roles_may_be_read_differently() -> None:
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    found = template(
        "{% for m in messages %}{% if m.role == 'user' %}" + parts + "{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    assert found.content_forms("user") == ContentForms(False, True)
    assert (
        found.content_forms("assistant")
        == found.content_forms("system")
        == ContentForms(True, False)
    )


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one message"):
        template("").render([])


def test_variables_reveal_template_features() -> None:
    variables = template(TEMPLATES["qwen3"]).variables
    assert {"messages", "tools", "enable_thinking"} <= variables
    assert not {"reasoning_effort", "namespace", "raise_exception"} & variables


def test_json_is_not_html_escaped() -> None:
    source = (
        "{{ messages[0] | tojson }}|{{ {'b': 1, 'a': 'ö'} | tojson(true, 1, [',', ':'], true) }}"
    )
    assert template(source).render([{"role": "<b>&'"}]) == (
        '{"role": "<b>&\'"}|{\n "a":"\\u00f6",\n "b":1\n}'
    )


def test_the_last_message_can_be_gone_on_with() -> None:
    messages = [*HI, {"role": "assistant", "content": "The answer is "}]
    text = template(TEMPLATES["qwen3"]).render(messages, continue_final=True)
    assert text.endswith("<|im_start|>assistant\nThe answer is ")
    parts = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "It"}]}]
    assert template(TEMPLATES["gemma4"]).render(parts, continue_final=True).endswith("model\nIt")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("started", ["It is ", "It is\n\n", "def f():\n    ", '{"a": "\\', "x"])
def test_a_continued_message_keeps_the_clients_text(name: str, started: str) -> None:
    """Blanks at the end, too, though most of these templates trim messages that are complete."""
    last = {"role": "assistant", "content": started}
    text = template(TEMPLATES[name]).render([*HI, last], continue_final=True)
    asked = template(TEMPLATES[name]).render(HI)
    between = " " if name == "mistral" else ""
    assert text == asked + between + started


_WITHOUT_REASONING = {
    # As Gemma 4's own template does: what follows an opening is reasoning, though none closes it.
    "<|channel>": "{% for part in m.content.split('<channel|>') %}{{ part.split('<|channel>')[0] }}"
    "{% endfor %}",
    "<think>": "{{ m.content.split('<think>')[0] | trim }}",
}


@pytest.mark.parametrize("opening", _WITHOUT_REASONING)
def test_reasoning_that_a_template_would_leave_out_is_gone_on_with(opening: str) -> None:
    said = _WITHOUT_REASONING[opening]
    source = f"{{% for m in messages %}}<{{{{ m.role }}}}>{said}</>{{% endfor %}}"
    for started in (f"{opening}thought\nHm. ", f"Yes. {opening}Or "):
        messages = [*HI, {"role": "assistant", "content": started}]
        text = template(source).render(messages, continue_final=True)
        assert text == f"<user>hi</><assistant>{started}"
        parts = [*HI, {"role": "assistant", "content": [{"type": "text", "text": started}]}]
        assert template(source).render(parts, continue_final=True) == text


def test_a_message_without_text_cannot_be_gone_on_with() -> None:
    with pytest.raises(NotContinued, match="no text to go on with"):
        template(TEMPLATES["qwen3"]).render([USER, CALL], continue_final=True)
    with pytest.raises(NotContinued, match="leaves out the last one"):
        template("nothing").render(HI, continue_final=True)


class TestFolder:
    def test_there_may_be_none(self, tmp_path: Path) -> None:
        opened = ChatTemplate.open(tmp_path, SPECIAL)
        assert not opened.exists
        with pytest.raises(RequestError, match="no chat template") as refused:
            opened.render(HI)
        assert refused.value.code == "no_chat_template"

    def test_the_configuration_holds_one(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
        assert ChatTemplate.open(tmp_path, SPECIAL).render(HI) == "one"

    def test_the_configuration_holds_several(self, tmp_path: Path) -> None:
        entries = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "with {{ tools | length }}"},
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
        opened = ChatTemplate.open(tmp_path, SPECIAL)
        assert opened.render(HI) == "plain"
        assert opened.render(HI, tools=[TOOL]) == "with 1"
        assert "plain" in opened.source
        assert "with" in opened.source

    def test_files_take_the_place_of_the_configuration(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
        (tmp_path / "chat_template.jinja").write_text("new")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        opened = ChatTemplate.open(tmp_path, SPECIAL)
        assert opened.render(HI) == "new"
        assert opened.render(HI, tools=[]) == "tools"

    def test_a_processors_template_may_be_alone(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor's"}))
        assert ChatTemplate.open(tmp_path, SPECIAL).render(HI) == "processor's"

    def test_a_processors_template_goes_before_the_decoders(self, tmp_path: Path) -> None:
        """Qwen2.5-VL has two templates; the one that knows tools knows no pictures."""
        sees = (
            "{% for part in messages[0].content %}"
            "{{ part.text if part.type == 'text' else '<see><image></see>' }}{% endfor %}"
        )
        calls = "{{ tools | length }}: {{ messages[0].content + '.' }}"
        for name, source in (("chat_template", sees), ("tokenizer_config", calls)):
            (tmp_path / f"{name}.json").write_text(json.dumps({"chat_template": source}))
        opened = ChatTemplate.open(tmp_path, SPECIAL)
        text = {"type": "text", "text": "What?"}
        asked = [{"role": "user", "content": [text, {"type": "image"}, text]}]
        marks = {"image": "<image>"}
        shown = "What?<see><image></see>What?"
        assert opened.render(asked, marks=marks) == shown
        assert opened.render(asked, tools=[{}, {}], marks=marks) == f"2: {shown}."

    def test_no_default_among_several(self, tmp_path: Path) -> None:
        entries = [{"name": "rag", "template": "x"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
        with pytest.raises(RequestError, match="no default chat template, only rag"):
            ChatTemplate.open(tmp_path, SPECIAL).render(HI)

    def test_another_shape_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template"):
            ChatTemplate.open(tmp_path, SPECIAL)


def test_every_conversation_renders_or_is_refused() -> None:
    """No template may fail in a way that is not an answer to the request."""
    rendered = 0
    for source in TEMPLATES.values():
        compiled = template(source)
        for messages in CONVERSATIONS.values():
            try:
                assert compiled.render(messages, tools=[TOOL])
                rendered += 1
            except RequestError:
                continue
    assert rendered >= 28


def test_models_published_without_a_template_have_their_authors(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image_placeholder>\nWhat?"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Why?"},
    ]
    special = {"bos_token": "<b>", "eos_token": "<e>"}
    for more, user, assistant in (
        ({}, "User", "Assistant"),
        ({"gen_vision_config": {}}, "<|User|>", "<|Assistant|>"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "multi_modality"} | more))
        template = ChatTemplate.open(tmp_path, special)
        assert template.render(messages) == (
            f"<b>Be brief.\n\n{user}: <image_placeholder>\nWhat?\n\n{assistant}: A cat.<e>"
            f"{user}: Why?\n\n{assistant}:"
        )
        assert template.render(messages[3:]).startswith("<b>You are a helpful language and vision")

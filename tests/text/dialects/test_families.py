"""The other dialects, case by case: with their markers as tokens, and as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.core.request import FinishReason
from quire.text.output import Answer
from tests.support.folding import fold
from tests.text.dialects.scripts import answer, events, spelled

Calls = list[tuple[str, Any]]

WEATHER: Calls = [("get_weather", {"city": "Tokyo"})]
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tokyo"}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nTokyo\n</parameter>\n"
    "</function>\n</tool_call>"
)
SEED = XML.replace("tool_call>", "seed:tool_call>").replace("\nTokyo\n", "Tokyo")
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Tokyo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Tokyo"}<｜tool▁call▁end｜>'
)
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Tokyo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Tokyo</arg_value>\n</tool_call>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Tokyo"}<|tool_call_end|>'
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Tokyo</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
PYTHON = 'get_weather(city="Tokyo")'
LFM2 = f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>"
OLMO3 = f"<function_calls>\n{PYTHON}\n</function_calls>"
ARRAY = '[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]'
COHERE = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    '"parameters": {"city": "Tokyo"}}\n]<|END_ACTION|>'
)
COMMAND_R = (
    'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": {\n'
    '            "city": "Tokyo"\n        }\n    }\n]\n```'
)
HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
HARMONY_CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Tokyo"}<|call|>'
)
ASSISTANT = "<|start|>user<|message|>hi<|end|><|start|>assistant"


def calls_of(found: Answer) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in found.tool_calls]


APERTUS = '<|tools_prefix|>[{"get_weather": {"city": "Tokyo"}}]<|tools_suffix|>'
XTML = (
    '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Tokyo<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Tokyo'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
)
LONGCAT = """\
<longcat_tool_call>get_weather
<longcat_arg_key>city</longcat_arg_key>
<longcat_arg_value>Tokyo</longcat_arg_value>
</longcat_tool_call>"""
HY3 = """\
<tool_calls>
<tool_call>get_weather<tool_sep>
<arg_key>city</arg_key>
<arg_value>Tokyo</arg_value>
</tool_call>
</tool_calls>"""

CASES: list[tuple[str, str, str, str, Calls]] = [
    ("none", "<think>a</think><tool_call>", "", "<think>a</think><tool_call>", []),
    # Kimi K3
    (
        "kimi_k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Well." + XTML
        + "<|close|>message<|sep|>",
        "Hm.",
        "Well.",
        WEATHER,
    ),
    ("kimi_k3", XTML.replace(' type="string"', ""), "", "", WEATHER),
    ("kimi_k3", XTML.replace(' index="1"', ""), "", "", WEATHER),
    (
        "kimi_k3",
        XTML[: XTML.index("<|open|>argument")]
        + '<|open|>json type="object"<|sep|>{"city": "Tokyo"}<|close|>json<|sep|>'
        + XTML[XTML.index("<|close|>call") :],
        "",
        "",
        WEATHER,
    ),
    (
        "kimi_k3",
        XTML.replace("Tokyo<|close|>argument<|sep|>", "Tokyo"),
        "",
        "",
        WEATHER,
    ),
    (
        "kimi_k3",
        XTML.replace('key="city"', 'key="a &amp; &quot;b&quot;"').replace("string", "number"),
        "",
        "",
        [("get_weather", {'a & "b"': "Tokyo"})],
    ),
    # Muse
    (
        "muse",
        "<|start|>assistant to=self<|message|>Hm.<|eom|><|start|>assistant to=commentary<|message|>"
        "Well.<|eom|><|start|>assistant to=get_weather<|message|>" + ATEM + "<|eot|>",
        "Hm.",
        "Well.",
        WEATHER,
    ),
    ("muse", "<|start|>assistant " + ATEM, "", "", WEATHER),
    (
        "muse",
        "<|start|>assistant to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Four."
        "<|eot|>",
        "Hm.",
        "Four.",
        [],
    ),
    ("muse", "<|start|>Four.", "", "<|start|>Four.", []),
    # Seed
    ("seed", "<seed:think>Hm.</seed:think>" + SEED + SEED, "Hm.", "", WEATHER * 2),
    ("seed", XML, "", XML, []),
    # Qwen
    ("qwen3", "<think>\nHm.\n</think>\n\nFour.\n", "Hm.", "Four.\n", []),
    ("qwen3", "<think>\n\n</think>\n\nFour.", "", "Four.", []),
    ("qwen3", "Hi\n" + HERMES + "\n" + HERMES, "", "Hi", WEATHER * 2),
    ("qwen3", "<think>\nHm.</think>\n\n" + XML, "Hm.", "", WEATHER),
    ("qwen3", "<think>\nHm." + HERMES + "ok", "Hm.", "ok", WEATHER),
    ("qwen3", "a" + HERMES + "\nb", "", "a\nb", WEATHER),
    (
        "qwen3",
        '<tool_call>{"name": "now", "arguments": {"x": "a</tool_call>b"}}</tool_call>',
        "",
        "",
        [("now", {"x": "a</tool_call>b"})],
    ),
    ("qwen3", '<tool_call>{"name": "now"}</tool_call>', "", "", [("now", {})]),
    ("qwen3", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", "", [("now", {})]),
    ("qwen3", '<tool_call>{"name": "now", "arguments": {"a":\t"b\nc"}}', "", "", [
        ("now", {"a": "b\nc"}),
    ]),
    # Qwen coder
    ("qwen3_coder", "I'll look.\n" + XML, "", "I'll look.", WEATHER),
    ("qwen3_coder", XML.removeprefix("<tool_call>\n"), "", "", WEATHER),
    ("qwen3_coder", XML + XML.removeprefix("<tool_call>\n") + "x", "", "x", WEATHER * 2),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>\na\n</parameter>b</parameter>"
        "<parameter=days>2</parameter><parameter=tags>[\"x\"]</parameter>"
        "<parameter=exact>True</parameter><parameter=limit>null</parameter>"
        "<parameter=where>{\"zip\": \"1\"}</parameter></function></tool_call>",
        "",
        "",
        [("get_weather", {
            "city": "a\n</parameter>b", "days": 2, "tags": ["x"], "exact": True, "limit": None,
            "where": {"zip": "1"},
        })],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>\nx\n<parameter=days>2\n</function>"
        "</tool_call>",
        "",
        "",
        [("get_weather", {"city": "x", "days": 2})],
    ),
    ("qwen3_coder", "<tool_call><function=now></function></tool_call>", "", "", [("now", {})]),
    # An empty tag leaves out what cannot be empty
    ("qwen3_coder", XML.replace("Tokyo", "\n</parameter>\n<parameter=days>\n\n</parameter>\n"
     "<parameter=limit></parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=tags>"),
     "", "", [("get_weather", {"city": "", "limit": None, "exact": True})]),
    ("qwen3_coder", XML.replace("city", "days").replace("Tokyo", ""), "", "",
     [("get_weather", {})]),
    # A closing tag that is written twice closes once; quoted calls stay whole
    (
        "qwen3_coder",
        XML.replace("Tokyo\n", "Tokyo\n</parameter>\n").replace(
            "</function>", "<parameter=days>\n2\n</parameter></parameter>\n</function>"
        ),
        "", "", [("get_weather", {"city": "Tokyo", "days": 2})],
    ),
    ("qwen3_coder", XML.replace("Tokyo", "<parameter=x>\ny\n</parameter>"), "", "",
     [("get_weather", {"city": "<parameter=x>\ny\n</parameter>"})]),
    ("qwen3_coder", XML.replace("Tokyo", "<parameter=x>\ny\n</parameter>\n</parameter>"), "", "",
     [("get_weather", {"city": "<parameter=x>\ny\n</parameter>"})]),
    # Llama
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Tokyo"}}', "", "", WEATHER),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Tokyo"}}', "", "",
     WEATHER),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Tokyo"}}; {"type": "function", '
     '"name": "now", "parameters": {}}', "", "", [*WEATHER, ("now", {})]),
    ("llama3", '{"function": {"name": "now", "arguments": {}}}', "", "", [("now", {})]),
    ("llama3", "[get_weather(city='Tokyo'), now()]", "", "", [*WEATHER, ("now", {})]),
    ("llama3", " [db.find(a=-1, b=[1, {'x': None}], c=true)]", "",
     " [db.find(a=-1, b=[1, {'x': None}], c=true)]", []),
    ("llama3", "[get_weather(city=\"it's )] x\", days=-1, limit=None, exact=true)]", "", "", [
        ("get_weather", {"city": "it's )] x", "days": -1, "limit": None, "exact": True}),
    ]),
    ("llama3", '[{"name": "get_weather", "parameters": {"city": "Tokyo"}}, {"name": "now"}]', "",
     "", [*WEATHER, ("now", {})]),
    ("llama3", '{"function": "get_weather", "parameters": {"city": "Tokyo"}}', "", "", WEATHER),
    ("llama3", 'Let me see.\n{"name": "get_weather", "parameters": {"city": "Tokyo"}}', "",
     "Let me see.", WEATHER),
    ("llama3", 'Let me see.\n\n[get_weather(city="Tokyo")]\n', "", "Let me see.", WEATHER),
    ("llama3", 'Both:\n{"name": "now",\n"parameters":\n{}}\n{"name": "now"}', "", "Both:",
     [("now", {}), ("now", {})]),
    ("llama3", 'See:\n{"name": "Alice"}\n[1, 2]', "", 'See:\n{"name": "Alice"}\n[1, 2]', []),
    ("llama3", '{"name": "Alice", "age": 3}', "", '{"name": "Alice", "age": 3}', []),
    ("llama3", '{"answer": [1, 2]}', "", '{"answer": [1, 2]}', []),
    ("llama3", "[1, 2, 3]", "", "[1, 2, 3]", []),
    ("llama3", "[get_weather(Tokyo)]", "", "[get_weather(Tokyo)]", []),
    ("llama3", "Say {\"name\": \"now\"}", "", "Say {\"name\": \"now\"}", []),
    ("llama3", "[", "", "[", []),
    # Brackets too many, and constants of Python
    ("qwen3", HERMES.replace("\n</tool_call>", "}\n</tool_call>"), "", "", WEATHER),
    ("llama3", '{"name": "now", "parameters": {}}}', "", "", [("now", {})]),
    ("qwen3_coder", XML.replace("Tokyo", "Tokyo\n</parameter>\n<parameter=tags>\n['a', 'b']"), "",
     "", [("get_weather", {"city": "Tokyo", "tags": ["a", "b"]})]),
    ("qwen3_coder", XML.replace("Tokyo", "Tokyo\n</parameter>\n<parameter=where>\n{'a': True}"),
     "", "", [("get_weather", {"city": "Tokyo", "where": {"a": True}})]),
    # Mistral
    ("mistral", "[THINK]Hm.[/THINK]Four.", "Hm.", "Four.", []),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Tokyo"}}]', "", "",
     WEATHER),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc"}, {"name": "now"}]', "",
     "", [("now", {}), ("now", {})]),
    ("mistral", 'Ok.[TOOL_CALLS]get_weather[ARGS]{"city": "Tokyo"}[TOOL_CALLS]now[ARGS]{}', "",
     "Ok.", [*WEATHER, ("now", {})]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Tokyo"}', "", "",
     WEATHER),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Tokyo"}', "", "", WEATHER),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": "[TOOL_CALLS]"}', "", "",
     [("now", {"a": "[TOOL_CALLS]"})]),
    # DeepSeek
    ("deepseek", "<think>\nHm.\n</think>\n\nFour.", "Hm.", "Four.", []),
    ("deepseek", "Ok." + V3, "", "Ok.", WEATHER),
    ("deepseek", V31 + V31[len("<｜tool▁calls▁begin｜>") :] + "<｜tool▁calls▁end｜>", "", "",
     WEATHER * 2),
    # GLM
    ("glm4", "<think>Hm.</think>\n" + GLM + "\n" + GLM, "Hm.", "", WEATHER * 2),
    ("glm4", GLM.replace("\n", ""), "", "", WEATHER),
    ("glm4", "<tool_call>now</tool_call>", "", "", [("now", {})]),
    ("glm4", GLM.replace("city", "days").replace("Tokyo", " "), "", "", [("get_weather", {})]),
    ("glm4", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>1</arg_value>"
     "<arg_key>days</arg_key><arg_value>1</arg_value><arg_key>new</arg_key><arg_value>[1]"
     "</arg_value></tool_call>", "", "", [("get_weather", {"city": "1", "days": 1, "new": [1]})]),
    # Granite
    ("granite", "Here is my thought process: Hm. Here is my response: Four.", " Hm.", " Four.", []),
    ("granite", "Say: Here is my response: Four.", "", "Say: Here is my response: Four.", []),
    ("granite", "<think>Hm.</think><response>Four.</response>", "Hm.", "Four.", []),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]', "", "",
     WEATHER),
    ("granite", HERMES, "", "", WEATHER),
    # Kimi
    ("kimi_k2", "<think>Hm.</think>Ok." + KIMI + "<|tool_calls_section_end|>", "Hm.", "Ok.",
     WEATHER),
    ("kimi_k2", KIMI + KIMI[len("<|tool_calls_section_begin|>") :], "", "", WEATHER * 2),
    # MiniMax
    ("minimax", "<think>\nHm.\n</think>\n\n" + MINIMAX, "Hm.", "", WEATHER),
    ("minimax", MINIMAX.replace("</minimax", MINIMAX[20:-20] + "</minimax"), "", "", WEATHER * 2),
    # LFM2
    ("lfm2", "<think>Hm.</think>Ok.\n" + LFM2, "Hm.", "Ok.", WEATHER),
    ("lfm2", LFM2 + "Looking.", "", "Looking.", WEATHER),
    ("lfm2", "<|tool_call_start|>[get_weather(city='it's \"nice\"\n', days=-1.5e1, exact=True, "
     "tags=['a', \"b\"], where={'zip': '\\u00e9\\'\\d'}, limit=None), db.find-all()]"
     "<|tool_call_end|>", "", "", [
        ("get_weather", {
            "city": "it's \"nice\"\n", "days": -15.0, "exact": True, "tags": ["a", "b"],
            "where": {"zip": "é'\\d"}, "limit": None,
        }),
        ("db.find-all", {}),
    ]),
    ("lfm2", f"<|tool_call_start|>{ARRAY}<|tool_call_end|>", "", "", WEATHER),
    ("lfm2", '<|tool_call_start|>[now(a="<|tool_call_end|>")]<|tool_call_end|>', "", "",
     [("now", {"a": "<|tool_call_end|>"})]),
    # OLMo 3
    ("olmo3", "<think>Hm.</think>" + OLMO3, "Hm.", "", WEATHER),
    ("olmo3", OLMO3.replace("\n</", "\nnow()\n</") + "ok", "", "ok", [*WEATHER, ("now", {})]),
    ("olmo3", "<function_calls>now(a=null, **{'b c': [(1,), {}]})</function_calls>", "", "",
     [("now", {"a": None, "b c": [[1], {}]})]),
    # Command R, R7B and A
    ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|>" + COHERE, "Hm.", "", WEATHER),
    ("cohere", COHERE.replace("\n]", ',\n    {"tool_name": "now"}\n]'), "", "",
     [*WEATHER, ("now", {})]),
    ("cohere", "<|START_RESPONSE|>Four.<|END_RESPONSE|>", "", "Four.", []),
    ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Four.<|END_TEXT|>", "Hm.",
     "Four.", []),
    ("cohere", COMMAND_R, "", "", WEATHER),
    ("cohere", "Ok. " + COMMAND_R.replace("Action: ", "Action:"), "", "Ok.", WEATHER),
    ("cohere", COMMAND_R.replace("get_weather", "directly_answer"), "",
     COMMAND_R.replace("get_weather", "directly_answer"), []),
    ("cohere", "Action: none", "", "Action: none", []),
    # Jamba, Hunyuan, Nemotron, Phi-4-mini, ERNIE
    ("jamba", f" Ok.<tool_calls>{ARRAY}</tool_calls>", "", " Ok.", WEATHER),
    ("hunyuan", "<think>\nHm.\n</think>\n<answer>\nFour.\n</answer>", "Hm.", "Four.", []),
    ("hunyuan", f"<think>Hm.</think>\n<answer><tool_calls>{ARRAY}</tool_calls></answer>", "Hm.", "",
     WEATHER),
    ("hunyuan", "助手：Four, 助手：", "", "Four, 助手：", []),
    ("nemotron", f"<think>Hm.</think>\n<TOOLCALL>{ARRAY}</TOOLCALL>", "Hm.", "", WEATHER),
    ("nemotron_mini", f"<toolcall> {ARRAY[1:-1]} </toolcall> <toolcall> {ARRAY[1:-1]} </toolcall>",
     "", "", WEATHER * 2),
    ("phi4", f"<|tool_call|>{ARRAY}<|/tool_call|>", "", "", WEATHER),
    ("phi4", f"functools{ARRAY}", "", "", WEATHER),
    ("phi4", "import functools", "", "import functools", []),
    ("ernie", "<think>Hm.</think>\n<response>\nFour.\n</response>", "Hm.", "Four.", []),
    ("ernie", "<think>Hm.</think>\n" + HERMES, "Hm.", "", WEATHER),
    # LongCat
    ("longcat", "<longcat_think>Hm.</longcat_think>" + LONGCAT, "Hm.", "", WEATHER),
    ("longcat", LONGCAT.replace("\n", ""), "", "", WEATHER),
    ("longcat", "<longcat_tool_call>\n" + json.dumps({"name": "now", "arguments": {}})
     + "\n</longcat_tool_call>", "", "", [("now", {})]),
    # GLM-4 9B
    ("glm4_9b", '\nget_weather\n{"city": "Tokyo"}', "", "", WEATHER),
    ("glm4_9b", 'I look.\n<|assistant|>get_weather\n{"city": "Tokyo"}\n<|assistant|>now\n{}', "",
     "I look.", [*WEATHER, ("now", {})]),
    ("glm4_9b", 'get_weather\n{"city": "Tokyo"}\nnow\n{}', "", "", [*WEATHER, ("now", {})]),
    ("glm4_9b", "<think>Hm.</think>\n<answer>Four.</answer>", "Hm.", "Four.", []),
    ("glm4_9b", 'get_rain\n{"city": "Tokyo"}', "", 'get_rain\n{"city": "Tokyo"}', []),
    ("glm4_9b", "now\nis the time", "", "now\nis the time", []),
    # Apertus
    ("apertus", f"<|inner_prefix|>Hm.<|inner_suffix|>Ok.{APERTUS}", "Hm.", "Ok.", WEATHER),
    ("apertus", APERTUS.replace("}}]", '}}, {"now": {}}]'), "", "", [*WEATHER, ("now", {})]),
    # Hunyuan 3
    ("hy3", "<think>Hm.</think>" + HY3, "Hm.", "", WEATHER),
    ("hy3", HY3.replace("\n", ""), "", "", WEATHER),
    ("hy3", "Ok.<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", "", "Ok.",
     [("now", {})]),
    ("hy3", HY3.replace("<tool_sep>", ""), "", "", WEATHER),
    # gpt-oss
    ("harmony", HARMONY + "<|channel|>final<|message|>Four.<|return|>", "Hm.", "Four.", []),
    ("harmony", HARMONY + HARMONY_CALL, "Hm.", "", WEATHER),
    ("harmony", HARMONY + "<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant"
     + HARMONY_CALL, "Hm.", "I'll look.", WEATHER),
    ("harmony", " to=functions.get_weather<|channel|>commentary json<|message|>"
     '{"city": "Tokyo"}<|call|>', "", "", WEATHER),
    ("harmony", "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final"
     "<|message|>Two.<|return|>", "", "One.\n\nTwo.", []),
    ("harmony", "<|channel|>final<|message|>say <|call|>", "", "say ", []),
    # Headers with a role that is written twice, and headers without `<|start|>`
    ("harmony", HARMONY + "assistant<|channel|>final<|message|>Four.<|return|>", "Hm.", "Four.",
     []),
    ("harmony", HARMONY.replace("<|start|>", "") + "<|channel|>final<|message|>Four.<|return|>",
     "Hm.", "Four.", []),
    ("harmony", HARMONY.removesuffix("<|start|>assistant") + HARMONY_CALL.removeprefix(
        "<|channel|>"), "Hm.", "", WEATHER),
    ("harmony", HARMONY.removesuffix("<|start|>assistant") + "Four.\nNo.", "Hm.", "Four.\nNo.", []),
    ("harmony", HARMONY.removesuffix("<|start|>assistant") + "Four.", "Hm.", "Four.", []),
]  # fmt: skip


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize(("dialect", "text", "reasoning", "content", "calls"), CASES)
def test_cases(
    dialect: str, text: str, reasoning: str, content: str, calls: Calls, with_ids: bool
) -> None:
    if dialect == "harmony" and not with_ids:
        text = "<|start|>assistant" + text  # without ids the prompt's tail cannot be known
    found = answer(
        dialect, text, prompt=ASSISTANT if dialect == "harmony" else "", with_ids=with_ids
    )
    assert (found.reasoning, found.text) == (reasoning, content)
    assert calls_of(found) == calls


MALFORMED = [
    ("qwen3", "<tool_call>prose</tool_call>"),
    ("qwen3", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {}</tool_call>'),
    ("qwen3", '<tool_call>{"arguments": {}}</tool_call>'),
    ("qwen3", "<tool_call>" + '{"name":' * 3000 + "</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nprose</function>\n</tool_call>"),
    ("qwen3_coder", "<function=\n"),
    ("mistral", "[TOOL_CALLS](now)"),
    ("mistral", '[TOOL_CALLS]now[ARGS]["a"]'),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{1}<｜tool▁call▁end｜>"),
    ("glm4", "<tool_call>get weather</tool_call>"),
    ("glm4", "<tool_call>f<arg_value>1</arg_value></tool_call>"),
    ("granite", "<|tool_call|>prose"),
    ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>x<|tool_call_end|>"),
    ("minimax", '<minimax:tool_call><invoke name="f">x</invoke></minimax:tool_call>'),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=b)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>prose<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=" + "[" * 3000 + "<|tool_call_end|>"),
    ("olmo3", "<function_calls>f(a=1 b=2)</function_calls>"),
    ("olmo3", "<function_calls>f(a='x</function_calls>"),
    ("cohere", '<|START_ACTION|>[{"parameters": {}}]<|END_ACTION|>'),
    ("cohere", "Action: ```json\n[]\n```"),
    ("jamba", '<tool_calls>[{"name": 1}]</tool_calls>'),
    ("hunyuan", "<tool_calls>prose</tool_calls>"),
    ("apertus", "<|tools_prefix|>[4]<|tools_suffix|>"),
    ("apertus", '<|tools_prefix|>[{"now": {}, "f": {}}]<|tools_suffix|>'),
    ("hy3", "<tool_call>get weather<tool_sep></tool_call>"),
    ("nemotron", "<TOOLCALL>[]</TOOLCALL>"),
    ("nemotron_mini", "<toolcall>now</toolcall>"),
    ("kimi_k3", "<|open|>tools<|sep|>now<|close|>tools<|sep|>"),
    ("muse", "<atem:function_calls>now</atem:function_calls>"),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="now"<|sep|>x<|close|>tools<|sep|>'),
    ("phi4", "<|tool_call|>prose<|/tool_call|>"),
    ("ernie", "<tool_call>prose</tool_call>"),
    ("glm4_9b", "get_weather\n{city}"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{prose<|call|>"),
    ("harmony", "plain words"),
]


@pytest.mark.parametrize(("dialect", "text"), MALFORMED)
def test_malformed_calls_are_text(dialect: str, text: str) -> None:
    found = answer(dialect, text, prompt=ASSISTANT if dialect == "harmony" else "")
    assert (found.text, found.tool_calls) == (text, [])


ONE_CALL: list[tuple[str, str]] = [
    ("qwen3", HERMES),
    ("qwen3_coder", XML),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Tokyo"}}'),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Tokyo"}'),
    ("deepseek", V3),
    ("dsml", DSML),
    ("glm4", GLM),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]'),
    ("kimi_k2", KIMI),
    ("minimax", MINIMAX),
    ("kimi_k3", XTML),
    ("muse", ATEM),
    ("lfm2", LFM2),
    ("olmo3", OLMO3),
    ("cohere", COHERE),
    ("cohere", COMMAND_R),
    ("jamba", f"<tool_calls>{ARRAY}</tool_calls>"),
    ("hunyuan", f"<tool_calls>{ARRAY}</tool_calls>"),
    ("apertus", APERTUS),
    ("hy3", HY3),
    ("longcat", LONGCAT),
    ("nemotron", f"<TOOLCALL>{ARRAY}</TOOLCALL>"),
    ("nemotron_mini", f"<toolcall>{ARRAY[1:-1]}</toolcall>"),
    ("phi4", f"<|tool_call|>{ARRAY}<|/tool_call|>"),
    ("glm4_9b", 'get_weather\n{"city": "Tokyo"}'),
    ("harmony", HARMONY_CALL),
]


@pytest.mark.parametrize(("dialect", "text"), ONE_CALL)
def test_cut_off_anywhere_leaves_a_whole_call_or_none(dialect: str, text: str) -> None:
    prompt = ASSISTANT if dialect == "harmony" else ""
    for end in range(1, len(text) - 1):
        found = answer(dialect, text[:end], prompt=prompt, finish=FinishReason.LENGTH)
        assert calls_of(found) in ([], WEATHER)
        assert found.finish is not None
        assert found.finish.reason is FinishReason.LENGTH
    assert calls_of(answer(dialect, text, prompt=prompt)) == WEATHER


PROMPTS: list[tuple[str, str, bool]] = [
    ("qwen3", "<|im_start|>assistant\n<think>\n", True),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("qwen3", "<|im_start|>user\n<think>\n<|im_end|>\n<|im_start|>assistant\n", False),
    ("deepseek", "hi<｜Assistant｜><think>\n", True),
    ("deepseek", "<think><｜Assistant｜></think>", False),
    ("cohere", "<|CHATBOT_TOKEN|><|START_THINKING|>", True),
    ("cohere", "<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>", False),
    ("nemotron", "<think>\n\n", True),
    ("kimi_k3", "<|end_of_msg|><|open|>message<|sep|><|open|>think<|sep|>", True),
    ("kimi_k3", "<|open|>think<|sep|><|end_of_msg|><|open|>response<|sep|>", False),
    ("muse", "<|start|>assistant to=self<|message|>", True),
    ("muse", "<|start|>assistant to=user<|message|>", False),
    ("muse", "<|start|>user<|message|>to=self<|eot|>", False),
    ("mistral", "[INST][THINK]hi[/INST]", False),
    ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", True),
    ("harmony", "<|start|>assistant<|channel|>final<|message|>", False),
    ("harmony", "<|start|>user<|channel|>analysis<|message|>x<|end|>", False),
]


@pytest.mark.parametrize(("dialect", "prompt", "thinks"), PROMPTS)
def test_starts_as_the_prompt_ends(dialect: str, prompt: str, thinks: bool) -> None:
    found = answer(dialect, "x", prompt=prompt)
    assert (found.reasoning, found.text) == (("x", "") if thinks else ("", "x"))
    assert found.finish is not None
    assert found.finish.usage.reasoning_tokens == (1 if thinks else 0)


@pytest.mark.parametrize(
    ("dialect", "text"), [("qwen3", "<think>a</think>" + HERMES), ("kimi_k2", KIMI)]
)
def test_markers_spelled_by_ordinary_tokens_are_text(dialect: str, text: str) -> None:
    found = fold(events(dialect, spelled(dialect, text)))
    assert (found.text, found.reasoning, found.tool_calls) == (text, "", [])


def test_ids_that_a_model_gives_are_kept() -> None:
    assert answer("kimi_k2", KIMI).tool_calls[0].id == "functions.get_weather:0"
    given = answer("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}").tool_calls[0].id
    assert given == "abcdefghi"
    made = answer("mistral", "[TOOL_CALLS]now[ARGS]{}").tool_calls[0].id
    assert len(made) == 9
    assert made.isalnum()

"""Chat templates for models that were published without one, derived from their publisher's code.

DeepSeek V3.2's prompts are those of encoding/encoding_dsv32.py in its repository: reasoning of
earlier turns is left out, reasoning between the tool calls of the last turn stays. Kimi K3's are
those of encoding_k3.py, and keep all reasoning. Falcon-OCR answers one question about one picture.
How it formats further messages is not published: here each is written in its place, and an answer
is followed by the token that ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = """\
{%- macro text(content, picture) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}
{{ picture if part.type == 'image' else part.text }}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""

_FALCON_OCR = (
    _TEXT
    + """\
{%- for message in messages -%}
{{ text(message.content, '<|image|>') }}
{%- if message.role == 'assistant' -%}{{ '<|end_of_query|>' }}
{%- elif message.role == 'user' -%}
{{ '' if text(message.content, '') | trim else 'Extract the text content from this image.' }}
{{- '\n<|OCR_PLAIN|>' }}
{%- endif -%}
{%- endfor -%}
"""
)

# The publisher's code formats no roles.
_DEEPSEEK_OCR = (
    _TEXT
    + """\
{{- bos_token -}}
{%- for message in messages -%}
{{ text(message.content, '<image>\n') }}
{%- if message.role == 'assistant' -%}{{ eos_token }}{%- endif -%}
{%- endfor -%}
"""
)

# Only the published processor has the prompt. A message without text asks for all text.
_GOT_OCR = (
    _TEXT
    + """\
{%- set told = messages[0].role == 'system' -%}
{%- set system = text(messages[0].content, '') if told else
    'You should follow the instructions carefully and explain your answers in detail.' -%}
{{- '<|im_start|>system\n' + system + '<|im_end|>' -}}
{%- for message in (messages[1:] if told else messages) -%}
{{ '<|im_start|>' + message.role + '\n' + text(message.content, '<imgpad>\n') }}
{{- ' OCR: ' if message.role == 'user' and not text(message.content, '') | trim }}
{{- '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
)

# The publisher's prompt for questions without boxes and masks.
_FALCON_PERCEPTION = (
    _TEXT
    + """\
{%- for message in messages -%}
{{ text(message.content, '<|image|>') }}
{%- if message.role == 'assistant' -%}{{ '<|end_of_query|>' }}{%- endif -%}
{%- endfor -%}
"""
)

# The first token is the placeholder of the picture.
_MOONDREAM = (
    _TEXT
    + """\
{{- '<|endoftext|>' -}}
{%- for message in messages -%}
{%- set said = text(message.content, '') -%}
{%- if message.role != 'user' -%}{{ said }}
{%- elif said | trim -%}
{{ '<|md_reserved_0|>query<|md_reserved_1|>' + said + '<|md_reserved_2|>' }}
{%- else -%}
{{ '<|md_reserved_0|>describe<|md_reserved_1|>normal<|md_reserved_2|>' }}
{%- endif -%}
{%- endfor -%}
"""
)

_DEEPSEEK_VL = """\
{{ bos_token }}\
{% if messages[0]['role'] != 'system' %}\
{{ 'You are a helpful language and vision assistant. You are able to understand the visual content \
that the user provides, and assist the user with a variety of tasks using natural language.\n\n' }}\
{% endif %}\
{% for message in messages %}\
{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}\
{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}\
{% else %}{{ 'Assistant: ' + message['content'] + eos_token }}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}\
"""
_JANUS = _DEEPSEEK_VL.replace("User:", "<|User|>:").replace("Assistant:", "<|Assistant|>:")

_DEEPSEEK_V32 = """\
{%- set dsml = '｜DSML｜' -%}
{%- set thinks = (thinking is defined and thinking)
    or (enable_thinking is defined and enable_thinking) -%}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list | length -%}
{%- set ns = namespace(seen=0) -%}
{%- macro functions() -%}
{{ '\n\n## Tools\nYou have access to a set of tools you can use to answer the user\\'s question.\n'
-}}
{{ 'You can invoke functions by writing a "<' + dsml + 'function_calls>" block like the following \
as part of your reply to the user:\n' -}}
{{ '<' + dsml + 'function_calls>\n<' + dsml + 'invoke name="$FUNCTION_NAME">\n<' + dsml +
'parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</' + dsml + 'parameter>\n\
...\n</' + dsml + 'invoke>\n<' + dsml + 'invoke name="$FUNCTION_NAME2">\n...\n</' + dsml +
'invoke>\n</' + dsml + 'function_calls>\n' -}}
{{ 'String and scalar parameters should be specified as is without any escaping or quotes, while \
lists and objects should use JSON format. The "string" attribute should be set to "true" for \
string type parameters and "false" for other types (numbers, booleans, arrays, objects).\n' -}}
{{ 'If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:\n<' + dsml + 'function_calls>\n...\n</' + dsml +
'function_calls>\n<function_results>\n...\n</function_results>\n\
<think>...thinking about results</think>\n' -}}
{{ 'Here are the functions available in JSONSchema format:\n<functions>\n' -}}
{%- for tool in tools -%}{{ tool.function | tojson }}{{ '\n' }}{%- endfor -%}
{{ '</functions>\n' -}}
{%- endmacro -%}
{{- '<｜begin▁of▁sentence｜>' -}}
{%- if tools and messages[0].role not in ('system', 'developer') -%}{{ functions() }}{%- endif -%}
{%- for message in messages -%}
{%- set open = add_generation_prompt or not loop.last -%}
{%- if message.role in ('system', 'developer') -%}
{{ message.content or '' }}
{%- if tools and loop.first -%}{{ functions() }}{%- endif -%}
{%- elif message.role == 'user' -%}
{%- set ns.seen = ns.seen + 1 -%}
{{ '<｜User｜>' + (message.content or '') }}
{%- if open -%}
{{ '<｜Assistant｜>' + ('<think>' if thinks and ns.seen == users else '</think>') }}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' -%}
{{ '\n\n<function_results>' }}
{%- endif -%}
{{ '\n<result>' + (message.content or '') + '</result>' }}
{%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' -%}
{{ '\n</function_results>' }}
{%- if open -%}
{{ '\n\n' + ('<think>' if thinks and ns.seen == users else '</think>') }}
{%- endif -%}
{%- endif -%}
{%- else -%}
{%- if thinks and ns.seen == users -%}
{{ (message.reasoning_content or '') + '</think>' }}
{%- endif -%}
{{ message.content or '' }}
{%- if message.tool_calls -%}
{{ '\n\n<' + dsml + 'function_calls>\n' }}
{%- for call in message.tool_calls -%}
{{ '<' + dsml + 'invoke name="' + call.function.name + '">\n' }}
{%- for key, value in call.function.arguments.items() -%}
{{ '<' + dsml + 'parameter name="' + key + '" string="' -}}
{{ 'true">' + value if value is string else 'false">' + (value | tojson) }}
{{- '</' + dsml + 'parameter>' + ('' if loop.last else '\n') }}
{%- endfor -%}
{{ '\n</' + dsml + 'invoke>\n' }}
{%- endfor -%}
{{ '</' + dsml + 'function_calls>' }}
{%- endif -%}
{{ '<｜end▁of▁sentence｜>' }}
{%- endif -%}
{%- endfor -%}
"""

# Results of calls are in the order of the calls, and numbered like them.
_KIMI_K3 = (
    _TEXT
    + """\
{%- set thinks = (thinking is not defined or thinking)
    and (enable_thinking is not defined or enable_thinking) -%}
{%- set effort = thinking_effort if thinking_effort is defined else
    (reasoning_effort if reasoning_effort is defined else none) -%}
{%- set ns = namespace(calls=[], run=[], ordered=[], open=true) -%}
{%- macro attribute(key, value) -%}
{{ ' ' + key + '="' + value | string | replace('&', '&amp;') | replace('"', '&quot;') + '"' }}
{%- endmacro -%}
{%- macro message_of(role, attributes, content) -%}
{{ '<|open|>message' + attribute('role', role) + attributes + '<|sep|>' + content }}
{{- '<|close|>message<|sep|><|end_of_msg|>' }}
{%- endmacro -%}
{%- macro part(name, content) -%}
{{ '<|open|>' + name + '<|sep|>' + content + '<|close|>' + name + '<|sep|>' }}
{%- endmacro -%}
{%- macro kind(value) -%}
{{ 'boolean' if value is boolean else 'null' if value is none else 'number' if value is number
    else 'string' if value is string else 'object' if value is mapping else 'array' }}
{%- endmacro -%}
{%- macro named(message) -%}
{{ attribute('name', message.name) if message.name else '' }}
{%- endmacro -%}
{%- macro calls(found) -%}
{%- for call in found -%}
{{ '<|open|>call' + attribute('tool', call.function.name) + attribute('index', loop.index) }}
{{- '<|sep|>' }}
{%- for key, value in call.function.arguments.items() -%}
{{ '<|open|>argument' + attribute('key', key) + attribute('type', kind(value)) + '<|sep|>' }}
{{- value if value is string else value | tojson }}{{ '<|close|>argument<|sep|>' }}
{%- endfor -%}
{{ '<|close|>call<|sep|>' }}
{%- endfor -%}
{%- endmacro -%}
{%- if tools -%}
{{ message_of('system', attribute('type', 'tool-declare'), '# Tools\nHere are the available tools, \
described in JSONSchema.\n\n```json\n' + tools | tojson(separators=(',', ':'), sort_keys=true) +
'\n```') }}
{%- endif -%}
{%- if thinks and effort in ('low', 'high', 'max') -%}
{{ message_of('system', attribute('type', 'thinking-effort'), '`thinking_effort` guides on how \
much to think in your thinking channel (not including the response channel), supported values \
include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort='
+ effort + '`.') }}
{%- endif -%}
{%- for message in messages -%}
{%- set said = text(message.content or '', '') -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}
{%- set ns.run, ns.ordered, ns.open = [], [], true -%}
{%- for result in messages[loop.index0:] -%}
{%- if result.role != 'tool' -%}{%- set ns.open = false -%}
{%- elif ns.open -%}{%- set ns.run = ns.run + [result] -%}{%- endif -%}
{%- endfor -%}
{%- for call in ns.calls -%}
{%- for result in ns.run if result.tool_call_id == call.id -%}
{%- set ns.ordered = ns.ordered + [[result, call.function.name]] -%}
{%- endfor -%}
{%- endfor -%}
{%- if ns.ordered | length != ns.run | length -%}
{%- set ns.ordered = [] -%}
{%- for result in ns.run -%}
{%- set usual = ns.calls[loop.index0].function.name if loop.index0 < ns.calls | length else '' -%}
{%- set ns.ordered = ns.ordered + [[result, result.name or usual]] -%}
{%- endfor -%}
{%- endif -%}
{%- for result, name in ns.ordered -%}
{{ message_of('tool', attribute('tool', name) + attribute('index', loop.index),
    text(result.content or '', '')) }}
{%- endfor -%}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- set ns.calls = message.tool_calls or [] -%}
{%- set thought = message.reasoning_content or '' -%}
{{ message_of('assistant', named(message), (part('think', thought) if thinks else '')
    + part('response', said) + (part('tools', calls(ns.calls)) if ns.calls else '')) }}
{%- else -%}
{{ message_of('user' if message.role == 'user' else 'system', named(message), said) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|open|>message' + attribute('role', 'assistant') + '<|sep|><|open|>' }}
{{- ('think' if thinks else 'response') + '<|sep|>' }}
{%- endif -%}
"""
)

_OWN = {
    "deepseek_v32": _DEEPSEEK_V32,
    **dict.fromkeys(("deepseek_vl_v2", "deepseekocr", "deepseekocr_2"), _DEEPSEEK_OCR),
    "falcon_ocr": _FALCON_OCR,
    "falcon_perception": _FALCON_PERCEPTION,
    "got_ocr2": _GOT_OCR,
    "kimi_k3": _KIMI_K3,
    **dict.fromkeys(("moondream1", "moondream2", "moondream3"), _MOONDREAM),
    "multi_modality": _DEEPSEEK_VL,
}


def own_template(config: Mapping[str, Any]) -> str | None:
    """Return the template for a model's `config.json`; None if its publisher provides one."""
    name = str(config.get("model_type"))
    if name == "multi_modality" and config.get("gen_vision_config") is not None:
        return _JANUS
    return _OWN.get(name)

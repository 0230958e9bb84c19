"""Chat templates of models that were published without one: what their publisher's code writes.

Falcon-OCR answers one question about one picture. What goes around further messages is not
published: here each is written in its place, and an answer is followed by the token that ends it.
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

# The publisher's prompt where it asks for no boxes and masks.
_FALCON_PERCEPTION = (
    _TEXT
    + """\
{%- for message in messages -%}
{{ text(message.content, '<|image|>') }}
{%- if message.role == 'assistant' -%}{{ '<|end_of_query|>' }}{%- endif -%}
{%- endfor -%}
"""
)

# The first token is where a picture stands.
_MOONDREAM3 = (
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

_OWN = {
    "falcon_ocr": _FALCON_OCR,
    "falcon_perception": _FALCON_PERCEPTION,
    "moondream3": _MOONDREAM3,
    "multi_modality": _DEEPSEEK_VL,
}


def own_template(config: Mapping[str, Any]) -> str | None:
    """The template of a model by its `config.json`; None where models publish their own."""
    name = str(config.get("model_type"))
    if name == "multi_modality" and config.get("gen_vision_config") is not None:
        return _JANUS
    return _OWN.get(name)

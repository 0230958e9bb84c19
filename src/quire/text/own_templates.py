"""Chat templates of models that were published without one: what their publisher's code writes.

They answer one question about one picture. What goes around further messages is not published:
here each is written in its place, and an answer is followed by the token that ends it.
"""

from __future__ import annotations

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
{%- elif message.role == 'user' -%}{{ '\n<|OCR_PLAIN|>' }}
{%- endif -%}
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

OWN = {"falcon_ocr": _FALCON_OCR, "moondream3": _MOONDREAM3}
"""By `model_type`."""

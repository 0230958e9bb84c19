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

OWN = {"falcon_ocr": _FALCON_OCR}
"""By `model_type`."""

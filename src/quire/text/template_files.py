"""Reads chat templates from the files of a model folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.folder import read_object, read_text
from quire.text.own_templates import own_template

DEFAULT = "default"
TOOL_USE = "tool_use"
_TOOLS = re.compile(r"\btools\b")


def template_sources(folder: Path) -> dict[str, str]:
    """Read the templates of a model folder, by name; there may be none.

    Template files (`chat_template.jinja`, `additional_chat_templates/NAME.jinja`) replace all
    others. `chat_template.json`, a processor's, precedes `tokenizer_config.json`, whose template
    may be that of the text decoder alone (Qwen2.5-VL); that one then serves requests with tools, if
    the first does not know tools. Models without any may have a template in `own_templates`.

    Raises:
        ModelError: a file cannot be read.
    """
    sources: dict[str, str] = {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = read_text(path) or ""
    single = read_text(folder / "chat_template.jinja")
    if single is not None:
        sources[DEFAULT] = single
    if sources:
        return sources
    of_tokenizer, of_processor = (
        _sources_in(read_object(folder / name).get("chat_template"), folder / name)
        for name in ("tokenizer_config.json", "chat_template.json")
    )
    sources = of_tokenizer | of_processor
    plain = of_tokenizer.get(DEFAULT, "")
    if _TOOLS.search(plain) and not _TOOLS.search(of_processor.get(DEFAULT, plain)):
        sources.setdefault(TOOL_USE, plain)
    if sources:
        return sources
    return _sources_in(own_template(read_object(folder / "config.json")), folder)


def _sources_in(value: Any, path: Path) -> dict[str, str]:
    """Return the templates of a `chat_template` entry: none, one text, or a list with names."""
    match value:
        case None:
            return {}
        case str():
            return {DEFAULT: value}
        case list() if all(isinstance(entry, dict) for entry in value):
            return {str(entry["name"]): str(entry["template"]) for entry in value}
        case _:
            raise ModelError(f"{path}: chat_template is neither a text nor a list of templates")

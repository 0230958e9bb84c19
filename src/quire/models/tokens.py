"""Which tokens end an answer. Three files know, and each may know one that the others do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def end_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """The union over `config.json`, `generation_config.json` and `tokenizer_config.json`.

    Gemma 4's tokenizer names only `<eos>`; the ends of its turns stand in the generation config.
    """
    ids = _as_ids(config.get("eos_token_id"))
    ids |= _as_ids((config.get("text_config") or {}).get("eos_token_id"))
    ids |= _as_ids(_read(folder / "generation_config.json").get("eos_token_id"))
    return frozenset(ids | _tokenizer_end(folder))


def _tokenizer_end(folder: Path) -> set[int]:
    tokenizer = _read(folder / "tokenizer_config.json")
    token = tokenizer.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not token:
        return set()
    for number, entry in tokenizer.get("added_tokens_decoder", {}).items():
        if entry.get("content") == token:
            return {int(number)}
    full = _read(folder / "tokenizer.json")  # last, since it may have tens of megabytes
    for entry in full.get("added_tokens", ()):
        if entry.get("content") == token:
            return {int(entry["id"])}
    return set()


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(item) for item in (value if isinstance(value, list) else [value])}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text("utf-8"))
    return content if isinstance(content, dict) else {}

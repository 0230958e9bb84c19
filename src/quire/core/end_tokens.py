"""End-of-answer tokens, collected from three files that may each name others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.folder import read_object
from quire.core.original_configs import read_config
from quire.core.token_ids import TokenFiles


def end_token_ids(folder: Path) -> frozenset[int]:
    """Return the union over `config.json`, `generation_config.json` and `tokenizer_config.json`.

    Gemma 4's tokenizer names only `<eos>`; its generation config has the tokens that end turns.

    Raises:
        ModelError: a file or its `eos_token_id` cannot be read; names the file.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    config = read_config(folder)
    text = config.get("text_config")
    ids = _as_ids(config.get("eos_token_id"), path)
    ids |= _as_ids(text.get("eos_token_id") if isinstance(text, dict) else None, path)
    ids |= _as_ids(read_object(generation).get("eos_token_id"), generation)
    files = TokenFiles(folder)
    ids |= _id_of(files.config.get("eos_token"), files)
    kind = str(config.get("model_type"))
    for key, usual in _NON_TEXT_TOKENS.get(kind, {}).items():
        ids |= _as_ids(config.get(key, usual), path, key)
    return frozenset(ids | _id_of(_PUBLISHED_IN_CODE.get(kind), files))


_PUBLISHED_IN_CODE = {
    "falcon_ocr": "<|end_of_query|>",
    "falcon_perception": "<|end_of_query|>",
    "got_ocr2": "<|im_end|>",
    **dict.fromkeys(("moondream1", "moondream2", "moondream3"), "<|endoftext|>"),
}
"""By `model_type`, end tokens that only the published code names."""
_NON_TEXT_TOKENS = {
    "falcon_perception": {"coord_token_id": 240, "size_token_id": 241, "seg_token_id": 262}
}
"""By `model_type`, keys and default ids of tokens for points, sizes or masks. They end a text
answer.
"""


def _id_of(token: Any, files: TokenFiles) -> set[int]:
    """Return the id of a token named in `tokenizer_config.json`; empty if there is none."""
    if isinstance(token, dict):
        token = token.get("content")
    if not token:
        return set()
    if not isinstance(token, str):
        raise ModelError(f"{files.config_file}: eos_token = {token!r} is not a string")
    found = files.id_of(token, ordinary=True)
    return set() if found is None else {found}


def _as_ids(value: Any, path: Path, key: str = "eos_token_id") -> set[int]:
    if value is None:
        return set()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelError(f"{path}: {key} = {value!r} is neither a number nor a list of them")
    return set(ids)

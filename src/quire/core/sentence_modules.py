"""Reads the files of sentence-transformers that say how hidden states become a vector.

`modules.json` lists the stages: the model, pooling, linear layers, and scaling to length one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from quire.core.request import PoolingKind

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_TEXTS = "sentence_bert_config.json"
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}
_OFFERED: Mapping[str, PoolingKind] = {
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean": "mean",
}


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The stages behind a model that embeds texts.

    Attributes:
        pooling: how the hidden states become one vector.
        projections: folders of linear layers, in order.
        normalized: whether the vector is scaled to length one.
        max_tokens: the most tokens of a text; None leaves that to the model.
        lowercase: whether texts are put into lower case first.
        prompts: beginnings of texts, by name.
        default_prompt: name of the prompt of texts that name none; empty for none.
        pools_prompt: whether the tokens of a prompt are pooled like the text's.
        problem: why the stages cannot be computed; empty if they can.
    """

    pooling: PoolingKind = "mean"
    projections: tuple[Path, ...] = ()
    normalized: bool = False
    max_tokens: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    pools_prompt: bool = True
    problem: str = ""


def read_modules(folder: Path) -> SentenceModules | None:
    """Return the stages that a model's folder describes; None if it describes none."""
    listed = _read(folder / MODULES)
    if not isinstance(listed, list):
        return None
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in listed]
    paths = [folder / str(each.get("path", "")) for each in listed]
    unknown = set(kinds) - set(_ORDER)
    if unknown:
        return SentenceModules(problem=f"the stage '{min(unknown)}' of {MODULES} is not supported")
    if kinds != sorted(kinds, key=_ORDER.index):
        order = ", ".join(kinds)
        return SentenceModules(
            problem=f"the order of stages in {MODULES} is not supported: {order}"
        )
    by_kind = dict(zip(kinds, paths, strict=True))
    pooling = _object(by_kind.get("Pooling", folder / "1_Pooling") / "config.json")
    mode = _mode(pooling)
    if mode not in _OFFERED:
        offered = ", ".join(_OFFERED)
        what = f"pooling by '{mode}' is not supported; offered are {offered}"
        return SentenceModules(problem=what)
    texts = _object(by_kind.get("Transformer", folder) / _TEXTS) or _object(folder / _TEXTS)
    settings = _object(folder / SETTINGS)
    prompts = settings.get("prompts") or {}
    limit = texts.get("max_seq_length")
    return SentenceModules(
        pooling=_OFFERED[mode],
        projections=tuple(p for k, p in zip(kinds, paths, strict=True) if k == "Dense"),
        normalized="Normalize" in kinds,
        max_tokens=limit if isinstance(limit, int) and limit > 0 else None,
        lowercase=texts.get("do_lower_case") is True,
        prompts={name: text for name, text in prompts.items() if isinstance(text, str)},
        default_prompt=str(settings.get("default_prompt_name") or ""),
        pools_prompt=pooling.get("include_prompt") is not False,
    )


def _mode(config: Mapping[str, Any]) -> str:
    """Return the pooling mode in the terms of newer files."""
    if isinstance(mode := config.get("pooling_mode"), str):
        return mode
    chosen = [key for key, value in config.items() if key.startswith("pooling_") and value is True]
    return "+".join(_OLD_KEYS.get(key, key) for key in chosen) or "mean"


def _object(path: Path) -> Mapping[str, Any]:
    found = _read(path)
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> Any:
    try:
        return cast(Any, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None

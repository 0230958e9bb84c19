"""How a model's hidden states become one vector, by the files of its folder.

The files are those of sentence-transformers: `modules.json` lists the stages after the model, and
the pooling stage's folder has a `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from quire.core.errors import NotOffered, RequestError
from quire.core.request import Embed

_MODULES = "modules.json"
_PROMPTS = "config_sentence_transformers.json"
_OLD_KEYS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
_OFFERED: Mapping[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean": "mean"}


@dataclass(frozen=True, slots=True)
class Pooling:
    """How one model embeds.

    Attributes:
        task: default task of requests.
        trained: whether the model's files name a pooling. If not, the model was trained to
            generate, not to embed.
        prompts: prefixes of inputs, by name.
        problem: why the model's own pooling cannot be computed; empty if it can.
    """

    task: Embed = field(default_factory=lambda: Embed("mean"))
    trained: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    def prompt(self, name: str | None) -> str:
        """Return the model's prompt of a name; an empty name has an empty prompt.

        Raises:
            RequestError: the model has none of this name.
        """
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(f"'{each}'" for each in self.prompts) or "none"
            raise RequestError(
                f"'prompt_name' is '{name}'; this model has: {known}.",
                param="prompt_name",
                code="invalid_value",
            )
        return self.prompts[name]

    def check(self) -> None:
        """Raise `NotOffered` if the model's own pooling cannot be computed."""
        if self.problem:
            raise NotOffered(self.problem, param="model", code="not_implemented")


def read_pooling(folder: Path) -> Pooling:
    """Read a model's pooling from the files of its folder."""
    modules = _read(folder / _MODULES)
    if not isinstance(modules, list):
        return Pooling()
    kinds = {str(each.get("type", "")).rpartition(".")[2]: each for each in modules}
    settings = _read(folder / _PROMPTS)
    prompts = settings.get("prompts") if isinstance(settings, dict) else None
    told = {name: text for name, text in (prompts or {}).items() if isinstance(text, str)}
    unknown = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        what = f"the stage '{min(unknown)}' of {_MODULES} is not supported"
        return Pooling(trained=True, problem=f"This model cannot embed here: {what}.")
    path = str(kinds.get("Pooling", {}).get("path", "1_Pooling"))
    mode = _mode(_read(folder / path / "config.json"))
    if mode not in _OFFERED:
        what = f"pooling by '{mode}' is not supported; offered are {', '.join(_OFFERED)}"
        return Pooling(trained=True, problem=f"This model cannot embed here: {what}.")
    return Pooling(Embed(_OFFERED[mode], "Normalize" in kinds), trained=True, prompts=told)


def _mode(config: Any) -> str:
    """Return the pooling mode in the terms of newer sentence-transformers files."""
    if not isinstance(config, dict):
        return "mean"
    if isinstance(mode := config.get("pooling_mode"), str):
        return mode
    chosen = [key for key, value in config.items() if key.startswith("pooling_") and value is True]
    return "+".join(_OLD_KEYS.get(key, key) for key in chosen) or "mean"


def _read(path: Path) -> Any:
    try:
        return cast(Any, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None

"""A model family for tests that emits given tokens, run by the real engine.

A prompt names its script by one special token. The model finds it as any model finds a word: by
attention. The script token's key outshines every other, the more so the later it stands, and its
value says which script it is and where it stands. So the next token follows from a row's position
alone, and the model needs no state: it works in batches, in chunks, and on blocks read from the
prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from quire.cache.specs import FullKV, LayerSpec
from quire.models.arguments import read_arguments
from quire.models.base import ForwardContext, LanguageModel, Module

MODEL_TYPE = "scripted"
HEAD_DIM = 64
CERTAIN = 40.0
"""The logit of the token that is next; all others have 0, so that it is drawn at any temperature
up to 1."""

_LOUD = 100.0
"""How much a script token's key outshines the one before it; exp(-100) is nothing in float32."""


@dataclass(frozen=True)
class Script:
    """The answer that a script token makes the model give.

    Attributes:
        after: tokens between the script token and the end of the prompt.
        tokens: the answer; the end token follows it.
    """

    after: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ScriptedArguments:
    """The keys of `config.json`. Script token i is `first_script + i`."""

    vocab_size: int
    first_script: int
    scripts: tuple[Script, ...]
    eos_token_id: int


class _Norm(Module):
    """The one weight, which tells the loader the model's type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.ones((1,))


class _Decoder(Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = _Norm()


class Scripted(LanguageModel):
    """One attention layer over script tokens, then a table."""

    def __init__(self, args: ScriptedArguments) -> None:
        super().__init__()
        self.model: nn.Module = _Decoder()
        self._args = args
        longest = max((len(script.tokens) for script in args.scripts), default=0)
        # The last row is for prompts without a script, the last column for what follows a script.
        table = np.full((len(args.scripts) + 1, longest + 1), args.eos_token_id, np.int32)
        for number, script in enumerate(args.scripts):
            table[number, : len(script.tokens)] = script.tokens
        self._table = mx.array(table)
        self._after = mx.array([script.after for script in args.scripts] + [0], dtype=mx.int32)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        scripts = tuple(Script(s["after"], tuple(s["tokens"])) for s in config["scripts"])
        return cls(read_arguments(ScriptedArguments, config, scripts=scripts))

    @property
    def layout(self) -> tuple[LayerSpec, ...]:
        return (FullKV(1, HEAD_DIM),)

    @property
    def vocab_size(self) -> int:
        return self._args.vocab_size

    def __call__(self, step: ForwardContext) -> mx.array:
        """Return the next token of each row, `[T, 1]`."""
        script = step.tokens - self._args.first_script  # [T]
        names_one = (script >= 0) & (script < len(self._args.scripts))
        loudness = mx.where(names_one, _LOUD * (step.positions + 1), 0)
        q = _vectors(mx.ones_like(loudness))
        value = _vectors(names_one, script, step.positions)
        seen = step.attend(0, q, _vectors(loudness), value, scale=1.0)[:, 0]  # [T, HEAD_DIM]
        found, number, place = (mx.round(seen[:, i]).astype(mx.int32) for i in range(3))
        number = mx.where(found == 1, number, len(self._args.scripts))
        index = step.positions - place - self._after[number]
        row: mx.array = self._table[number, mx.clip(index, 0, self._table.shape[1] - 1)]
        return row[:, None].astype(mx.float32)

    def logits(self, hidden: mx.array) -> mx.array:
        return CERTAIN * (mx.arange(self.vocab_size) == hidden).astype(mx.float32)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return weights


def _vectors(*elements: mx.array) -> mx.array:
    """`[T]` arrays as the first elements of vectors `[T, 1, HEAD_DIM]`."""
    first = mx.stack([each.astype(mx.float32) for each in elements], axis=-1)
    return mx.pad(first, [(0, 0), (0, HEAD_DIM - len(elements))])[:, None]


def write_scripted(
    folder: Path,
    scripts: Sequence[Script],
    *,
    vocab_size: int,
    first_script: int,
    eos_token_id: int,
    context: int = 8192,
) -> None:
    """Writes `config.json` and the weights of a scripted model into a folder."""
    config = {
        "model_type": MODEL_TYPE,
        "vocab_size": vocab_size,
        "first_script": first_script,
        "scripts": [asdict(script) for script in scripts],
        "eos_token_id": eos_token_id,
        "max_position_embeddings": context,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"model.norm.weight": mx.ones((1,))}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})

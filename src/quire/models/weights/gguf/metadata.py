"""Expected types of the GGUF metadata keys that are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.values import LARGEST


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of values, with bounds.

    Attributes:
        name: the type's name in messages.
        fits: returns whether a value has this type.
    """

    name: str
    fits: Callable[[Any], bool]


def check(path: Path, key: str, value: Any, kind: Kind) -> None:
    """Raise `ModelError` if the value does not have this type; the message names file and key."""
    if not kind.fits(value):
        shown = repr(value)
        shown = shown if len(shown) < 80 else f"{shown[:60]}..."
        raise ModelError(f"{path}: {key} = {shown} is not {kind.name}")


def kind_of(key: str) -> Kind:
    """Return the expected type of an architecture's key, without its prefix; sizes by default."""
    return _OF_ARCHITECTURE.get(key, SIZE)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_whole(value) and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _by_layer(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    several = _list_of(fits)
    return lambda value: fits(value) or (several(value) and len(value) > 0)


def _is_period(value: Any) -> bool:
    return (_is_size(value) and value > 0) or _list_of(lambda each: isinstance(each, int))(value)


WORD = Kind("a string", lambda value: isinstance(value, str))
WORDS = Kind("a list of strings", _list_of(lambda value: isinstance(value, str)))
FLAG = Kind("a flag", lambda value: isinstance(value, int))  # some writers use 0 and 1
WHOLE = Kind("an integer", _is_whole)
WHOLES = Kind("a list of integers", _list_of(_is_whole))
NUMBER = Kind("a finite number", _is_number)
NUMBERS = Kind("a list of finite numbers", _list_of(_is_number))
SIZE = Kind(f"an integer from 0 to {LARGEST}", _is_size)
POSITIVE = Kind(f"an integer from 1 to {LARGEST}", lambda value: _is_size(value) and value > 0)
_SIZES = Kind(f"an integer from 0 to {LARGEST}, or a list of them", _by_layer(_is_size))
_BY_LAYER = Kind("a finite number, or a list of them", _by_layer(_is_number))
_PERIOD = Kind("an integer from 1, or a list of flags", _is_period)

_OF_ARCHITECTURE: Mapping[str, Kind] = {
    "attention.head_count": _SIZES,
    "attention.head_count_kv": _SIZES,
    "feed_forward_length": _SIZES,
    "rope.dimension_sections": WHOLES,
    "attention.sliding_window_pattern": _PERIOD,
    "rope.scaling.type": WORD,
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"), _BY_LAYER),
    "expert_weights_norm": FLAG,
    "use_parallel_residual": FLAG,
    "ssm.dt_b_c_rms": FLAG,
    "rope.scaling.finetuned": FLAG,
    **dict.fromkeys(
        (
            "block_count",
            "context_length",
            "embedding_length",
            "rope.scaling.original_context_length",
            "ssm.time_step_rank",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        (
            "attention.clamp_kqv",
            "attention.layer_norm_epsilon",
            "attention.layer_norm_rms_epsilon",
            "attention.scale",
            "attention.temperature_scale",
            "attention.value_scale",
            "attn_logit_softcapping",
            "embedding_scale",
            "expert_weights_scale",
            "final_logit_softcapping",
            "logit_scale",
            "residual_scale",
            "rope.freq_base",
            "rope.freq_base_swa",
            "rope.scale_linear",
            "rope.scaling.attn_factor",
            "rope.scaling.factor",
            "rope.scaling.yarn_attn_factor",
            "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow",
            "rope.scaling.yarn_log_multiplier",
        ),
        NUMBER,
    ),
}
OF_TOKENIZER: Mapping[str, Kind] = {
    "model": WORD,
    "pre": WORD,
    "tokens": WORDS,
    "merges": WORDS,
    "token_type": WHOLES,
    "scores": NUMBERS,
    "precompiled_charsmap": WHOLES,
    "add_bos_token": FLAG,
    "add_eos_token": FLAG,
    "add_space_prefix": FLAG,
    "remove_extra_whitespaces": FLAG,
}
"""Types of the tokenizer's keys. Other keys are ids, integers; an id that is no token's
means none.
"""

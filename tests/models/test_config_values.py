"""A value that a configuration may not hold is refused by name; faults of ours are not its."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.models import registry
from quire.models.settings import Settings
from quire.models.weights.loader import context_length, trained_length
from tests.support.registered import CONFIGS

Config = dict[str, Any]

WRONG: tuple[Any, ...] = ("x", [], ["x"], {}, {"x": "y"}, [None], None, True, 0, -1, 3, 1.5)
DAILY = ("llama",)
LLAMA3 = CONFIGS["llama"]["rope_parameters"]
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}


def paths(config: Config, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the way to each key, of nested objects too."""
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def changed(config: Config, path: tuple[str, ...], value: Any) -> Config:
    config = deepcopy(config)
    at = config
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return config


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in DAILY else pytest.mark.slow) for n in CONFIGS],
)
def test_any_value_is_used_or_refused(name: str) -> None:
    refused = 0
    for path in paths(CONFIGS[name]):
        for value in WRONG:
            config = changed(CONFIGS[name], path, value)
            try:
                registry.build(config)
                context_length(config)
                trained_length(config)
            except ModelError:
                refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0 is less than 1"),
        ("llama", {"hidden_size": 3, "head_dim": None}, "head_dim = 0 is less than 1"),
        ("llama", {"rope_parameters": "yarn"}, "rope_parameters = 'yarn' is of the wrong type"),
        ("llama", {"rope_theta": -1, "rope_parameters": None}, "rope_theta = -1.0 is out of"),
        ("qwen3", {"layer_types": [3]}, r"layer_types = \[3\] has an element of the wrong type"),
        ("llama", {"vocab_size": 2**40}, "vocab_size = 1099511627776 is more than"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 is more than"),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps = nan is not finite"),
        ("llama", {"rope_parameters": YARN | {"factor": math.inf}}, "factor = inf is not finite"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": 0}}, "beta_fast = 0 is out of bounds"),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}}, "low_freq_factor is"),
        ("llama", {"rope_parameters": {"mrope_section": [8]}}, r"mrope_section = \[8\] is not"),
        ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05 is less than 0"),
        ("llama", {"head_dim": 2**30}, "head_dim = 1073741824 in . heads is more than"),
        ("gemma4", {"text_config": 3}, "text_config = 3 is of the wrong type"),
        ("internvl_chat", {"llm_config": "x"}, "llm_config = 'x' is of the wrong type"),
    ],
)
def test_the_key_is_named(name: str, changes: Config, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        registry.build(CONFIGS[name] | changes)


def test_a_fault_of_ours_is_not_the_configuration_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(settings: object) -> Any:
        raise KeyError("a name that this code misspelt")

    faulty = replace(registry.FAMILIES["llama"], build=build)
    monkeypatch.setitem(registry.FAMILIES, "llama", faulty)
    with pytest.raises(KeyError):
        registry.build(CONFIGS["llama"])


@pytest.mark.parametrize("name", ["use_qk_norm", "lm_head_bias", "use_parallel_residual"])
def test_a_switch_that_is_on_changes_results(name: str) -> None:
    config = CONFIGS["llama"]
    registry.build(config | {name: False})
    with pytest.raises(ModelError, match=rf"config.json: {name} = True is not supported"):
        registry.build(config | {name: True})


def test_norms_that_a_family_always_has_may_be_named_and_not_turned_off() -> None:
    config = CONFIGS["hunyuan_v1_dense"]
    registry.build(config | {"use_qk_norm": True})
    with pytest.raises(ModelError, match=r"use_qk_norm = False is not supported"):
        registry.build(config | {"use_qk_norm": False})


def test_what_was_asked_of_a_part_was_not_asked_of_the_whole() -> None:
    whole = Settings({"clip_qkv": 2.5, "vision_config": {"clip_qkv": 1.5, "scale_emb": 3.0}})
    vision = whole.nested("vision_config")
    assert vision.number("clip_qkv") == 1.5
    with pytest.raises(ModelError, match=r"config.json: clip_qkv = 2.5 is not supported"):
        whole.refuse_unasked()
    assert whole.number("clip_qkv") == 2.5
    whole.refuse_unasked()
    with pytest.raises(ModelError, match=r"vision_config.scale_emb = 3.0 is not supported"):
        vision.refuse_unasked()
    assert vision.number("scale_emb") == 3.0
    whole.within("vision_config").refuse_unasked()  # the same part again

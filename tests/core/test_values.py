"""JSON objects of model folders: what they may hold, and how the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.core.original_configs import by_usual_keys
from quire.core.values import Values
from quire.media.kinds import KINDS

FILE = Path("folder/preprocessor_config.json")
VALUES: dict[str, Any] = {
    "model_type": "m",
    "none": None,
    "word": "x",
    "size": {"height": "tall", "empty": {}, "some": [1, "x"]},
}


def values() -> Values:
    return Values(VALUES, file=FILE)


def test_a_null_counts_as_absent() -> None:
    read = values()
    assert read.integer("none", default=3) == 3
    assert read.number("none", "gone", default=0.5) == 0.5
    assert read.word("none", "word") == "x"
    assert not read.has("none")
    assert (read.value("none", 3), read.value("gone"), read.value("word", 3)) == (3, None, "x")
    read.neutral({"none": 1, "gone": 2})
    assert read.nested("none", "size").prefix == "size."
    assert read.nested("none", "gone", needed=False).values == {}


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda v: v.integer("word"), "word = 'x' is of the wrong type"),
        (lambda v: v.nested("size").integer("height"), "size.height = 'tall' is of the wrong"),
        (lambda v: v.nested("size").integers("some"), "size.some = [1, 'x'] has an element of"),
        (lambda v: v.nested("size").only("height", 1, 2), "size.height = 'tall' is not supported"),
        (lambda v: v.nested("word"), "word = 'x' is of the wrong type"),
        (lambda v: v.like({"a": -1}).number("a", minimum=0), "a = -1.0 is less than 0"),
        (lambda v: v.like({"a": float("nan")}).number("a", minimum=0), "a = nan is not finite"),
        (lambda v: v.like({"a": 0}, "b.").integer("a"), "b.a = 0 is less than 1"),
    ],
)
def test_file_and_key_are_named(read: Callable[[Values], object], said: str) -> None:
    with pytest.raises(ModelError) as refused:
        read(values())
    assert str(refused.value).startswith(f"{FILE}: {said}")


def test_what_is_missing_is_named() -> None:
    for read, said in (
        (lambda: values().integer("none", "gone"), f"{FILE} of a 'm' model lacks 'none'"),
        (lambda: values().nested("size").nested("empty"), f"{FILE} lacks 'size.empty'"),
    ):
        with pytest.raises(ModelError) as refused:
            read()
        assert str(refused.value) == said
    assert str(values().error("gone", "why")) == f"{FILE}: gone is missing, why"


def test_a_part_or_the_object_itself() -> None:
    size = values().nested("size")
    assert size.within("empty").prefix == "size.empty."
    assert size.within("gone").prefix == size.prefix
    assert values().within("none").values == VALUES


def test_a_null_among_original_keys_is_absent() -> None:
    vision = {"qk_normalization": None, "qkv_bias": None, "image_size": None, "hidden_size": 8}
    config = {"model_type": "internvl_chat", "llm_config": {"hidden_size": 8}}
    given = by_usual_keys(config | {"select_layer": None, "vision_config": vision})
    assert given == by_usual_keys(config | {"vision_config": {"hidden_size": 8}}) | {
        "select_layer": None,
        "vision_config": vision | given["vision_config"],
    }
    assert given["vision_feature_layer"] == -1


def test_original_keys_are_named_by_their_whole_way() -> None:
    config = {
        "model_type": "multi_modality",
        "vision_config": {"params": {"model_name": "other"}},
        "language_config": {"hidden_size": 1},
        "aligner_config": {"params": {"projector_type": "mlp_gelu"}},
    }
    with pytest.raises(ModelError, match=r"config.json: vision_config.params.model_name = 'other'"):
        by_usual_keys(config)
    config["aligner_config"] = {"params": {"projector_type": "linear"}}
    with pytest.raises(ModelError, match=r"aligner_config.params.projector_type = 'linear'"):
        by_usual_keys(config)


def test_a_section_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    (tmp_path / "processor_config.json").write_text('{"image_processor": 3}')
    with pytest.raises(ModelError, match=r"processor_config.json: image_processor = 3 is of the"):
        KINDS["image"].open(tmp_path)

"""A program that was traced from an encoder computes what the encoder does, to the bit."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from quire.device.device import current_device, open_device
from quire.models.base import LanguageModel, named_parameters
from quire.models.weights.loader import open_model
from quire.program.encoder_rows import RowProgram
from quire.program.pieces import at_once
from quire.program.primitives import compute
from quire.program.trace import NotLinear, trace_encoder
from tests.program.programs import replay
from tests.support.media_items import CONFIGS, encoders, random_features, shape_for
from tests.support.tiny_models import write_model

EVERYDAY = {
    ("gemma4, pictures", "image"),  # norms of heads, rotation by two axes
    ("gemma4, sounds", "audio"),  # convolutions, biases by distance
    ("qwen2_5_vl", "image"),  # windows
    ("qwen3_vl", "image"),  # levels, a stretched table of places
    ("qwen3_vl", "video"),
    ("gemma3", "image"),  # SigLIP
    ("llava_next", "image"),  # tiles in a grid
    ("ernie4_5_vl_moe", "image"),  # pairs of frames
}
"""One for each kind of encoder."""


def _opened(name: str, folder: Path, dtype: str = "float32") -> LanguageModel:
    return open_model(str(write_model(folder / name, CONFIGS[name])), dtype=dtype).model


def _differences(model: LanguageModel, kind: str) -> list[float]:
    """Return the largest differences of the program's rows from the encoder's, as it is traced and
    as it is recorded, for one item and for several.
    """
    encoder = model.encoders[kind]
    shape = shape_for(encoder)
    operations, program = current_device().operations, at_once(trace_encoder(model, kind, shape))
    assert bool(program.symbols) == encoder.takes_several
    found: list[float] = []
    for items in (1, 3) if encoder.takes_several else (1,):
        features = random_features(model, kind, shape, items)
        expected = encoder(features, shape)
        given, of_rows = {"features": features}, at_once(RowProgram.of(program, items))
        sizes = {"T": of_rows.rows}
        for rows in (
            replay(program, operations, given, {"N": items}),
            replay(of_rows.program, operations, {**given, **of_rows.tables}, sizes),
        ):
            for theirs, ours in zip(expected, rows, strict=True):
                assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
                found.append(mx.abs(theirs - ours).max().item())
    return found


@pytest.mark.parametrize(("name", "kind"), sorted(EVERYDAY))
def test_a_program_gives_the_encoder_s_rows(name: str, kind: str, tmp_path: Path) -> None:
    open_device("auto")
    assert not any(_differences(_opened(name, tmp_path), kind))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), sorted({*encoders()} - EVERYDAY))
def test_every_encoder_s_program_gives_its_rows(name: str, kind: str, tmp_path: Path) -> None:
    open_device("auto")
    assert not any(_differences(_opened(name, tmp_path), kind))


@pytest.mark.parametrize(
    ("name", "kind"), [("gemma4, pictures", "image"), ("gemma4, sounds", "audio")]
)
def test_a_program_in_bfloat16_gives_the_encoder_s_rows(
    name: str, kind: str, tmp_path: Path
) -> None:
    open_device("mlx")
    assert not any(_differences(_opened(name, tmp_path, "bfloat16"), kind))


@pytest.mark.parametrize("name", ["gemma4, pictures", "qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe"])
def test_items_that_one_call_encodes_have_the_rows_of_each_alone(name: str, tmp_path: Path) -> None:
    open_device("auto")
    encoder = (model := _opened(name, tmp_path)).encoders["image"]
    shape = shape_for(encoder)
    features = random_features(model, "image", shape, items=3)
    alone = [encoder(each, shape) for each in mx.split(features, 3)]
    for level, together in enumerate(encoder(features, shape)):
        for own, theirs in zip(mx.split(together, 3), alone, strict=True):
            assert mx.allclose(own, theirs[level], atol=1e-5)


def test_an_array_may_wait_for_others() -> None:
    """An encoder with scores of many bytes computes some after others."""
    first, other = mx.ones(3), mx.zeros(2)
    found = compute("Depends", [first, other], (), (3,), [mx.float32])
    assert len(found) == 1
    assert mx.array_equal(found[0], first)


def test_tracing_leaves_the_encoder_as_it_was(tmp_path: Path) -> None:
    model = _opened("gemma4, pictures", tmp_path)
    before = named_parameters(model)
    at_once(trace_encoder(model, "image", (4, 8)))
    after = named_parameters(model)
    assert all(after[name] is array for name, array in before.items())


def test_an_encoder_that_depends_on_the_items_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _opened("gemma4, pictures", tmp_path)
    tower = type(model.encoders["image"].vision_tower)  # type: ignore[attr-defined]
    monkeypatch.setattr(tower, "pooled", lambda self, x, columns: x * mx.array(float(len(x))))
    with pytest.raises(NotLinear):
        at_once(trace_encoder(model, "image", (4, 8)))

"""RoPE: the CPU's table against MLX's fused operation, which GPUs use."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.core.errors import ModelError
from quire.models.layers.rope import Rope, RopeParameters
from quire.models.settings import Settings

PARAMETERS = {
    "default": RopeParameters(rope_theta=500.0),
    "partial": RopeParameters(partial_rotary_factor=0.25),
    "linear": RopeParameters(rope_type="linear", factor=4.0),
    "proportional": RopeParameters(
        rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25
    ),
    "yarn": RopeParameters(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, truncate=False
    ),
    "neighbours": RopeParameters(rope_theta=500.0, interleaved=True),
    "neighbours-partial": RopeParameters(partial_rotary_factor=0.5, interleaved=True),
    "longrope": RopeParameters(
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=64,
        long_factor=tuple(1.0 + 0.2 * i for i in range(32)),
        longer=True,
    ),
    "yarn-partial": RopeParameters(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        partial_rotary_factor=0.5,
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_table_and_kernel_agree_at_ragged_positions(name: str) -> None:
    rope = Rope(64, PARAMETERS[name])
    x = mx.random.normal((5, 3, 64), key=mx.random.key(1))
    positions = mx.array([0, 900, 3, 3, 77])

    table, kernel = rope._table(positions)(x), rope._kernel(positions)(x)

    assert mx.max(mx.abs(table - kernel)).item() < 2e-4  # angles of 900 radians in float32
    assert mx.max(mx.abs(table - x)).item() > 0.1
    assert mx.array_equal(table[2:3], rope(positions[2:3])(x[2:3]))


def test_half_precision_stays_half_precision() -> None:
    x = mx.ones((2, 1, 64), dtype=mx.bfloat16)
    assert Rope(64, PARAMETERS["yarn"])(mx.array([1, 2]))(x).dtype == mx.bfloat16


def test_proportional_leaves_the_slow_pairs_alone() -> None:
    x = mx.random.normal((1, 1, 64), key=mx.random.key(2))
    y = Rope(64, PARAMETERS["proportional"])(mx.array([100]))(x)
    moved = (mx.abs(y - x)[0, 0] > 0).tolist()
    assert moved == [i % 32 < 8 for i in range(64)]


def test_old_and_new_spelling_mean_the_same() -> None:
    old = Settings(
        {
            "rope_theta": 5e5,
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        }
    )
    new = Settings(
        {
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        }
    )
    assert old.rope() == new.rope()


def test_unknown_types_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="longrope"):
        Settings({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}).rope()
    with pytest.raises(ModelError, match="factor"):
        Settings({"rope_scaling": {"rope_type": "llama3"}}).rope()


def test_llama3_is_a_step_where_both_bounds_are_equal() -> None:
    """Llama 4 Scout has such bounds."""
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "factor": 16.0}
    trained = {"original_max_position_embeddings": 8192}
    parameters = RopeParameters.from_dict(
        {"rope_type": "llama3", "rope_theta": 5e5} | bounds | trained
    )
    plain = 5e5 ** -(mx.arange(0, 128, 2) / 128)
    turns = 8192 * plain / (2 * mx.pi)
    expected = mx.where(turns > 1, plain, plain / 16)
    assert 0 < (turns > 1).sum().item() < 64
    assert mx.allclose(Rope(128, parameters)._frequencies, expected, rtol=1e-6)


def test_three_positions_turn_their_own_pairs() -> None:
    rope = Rope(
        64, RopeParameters(partial_rotary_factor=0.5, mrope_section=(6, 5, 5))
    )  # 16 pairs: time, height, width in turn, the last ones time
    x = mx.random.normal((1, 1, 64), key=mx.random.key(3))

    def moved(positions: list[int]) -> set[int]:
        y = rope(mx.array(positions)[:, None])(x)
        return {pair for pair in range(16) if abs((y - x)[0, 0, pair].item()) > 0}

    assert moved([0, 9, 0]) == set(range(1, 15, 3))
    assert moved([0, 0, 9]) == set(range(2, 15, 3))
    assert moved([9, 0, 0]) == set(range(0, 15, 3)) | {15}
    same = rope(mx.array([[5], [5], [5]]))(x)
    assert mx.array_equal(same, rope(mx.array([5]))(x))

"""Input and output of the sampler for each row. Uses no MLX operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.constraints.masks import TokenMask
from quire.core.request import SamplingParams

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, slots=True)
class History:
    """The tokens before the sampled one, as far as the host knows them; int32.

    Attributes:
        prompt: each token of the prompt, once or more often; all in their order where
            `params.penalises_repeats`.
        generated: the answer so far.
    """

    prompt: npt.NDArray[np.int32]
    generated: npt.NDArray[np.int32]


class RowSampling(NamedTuple):
    """The sampler's input for one row. It is a tuple for the same reason as `core.request.Output`.

    Attributes:
        position: index of the sampled token in the sequence. With the seed it determines all
            randomness.
        history: given when `params.needs_history`.
        pending: int32 `[1]` on the device: the token of the previous step, not yet read by the
            host. It belongs to the generated part of the history.
        mask: mask of allowed tokens; None allows all.
    """

    params: SamplingParams
    position: int
    history: History | None = None
    pending: mx.array | None = None
    mask: TokenMask | None = None


def history_of(row: RowSampling) -> History:
    """Return the tokens before a row's.

    Raises:
        ValueError: the row came without them.
    """
    if row.history is None:
        raise ValueError("a row with penalties needs its history of tokens")
    return row.history


class Moved(NamedTuple):
    """Rows that come earlier than their inputs say, by a number of rows that is on the device.

    Attributes:
        rows: int32 `[R]`, by how many.
        most: the most, of each row.
    """

    rows: mx.array
    most: Sequence[int]


class Sampled(NamedTuple):
    """The sampler's lazy results.

    Attributes:
        tokens: int32 [R].
        logprobs: float32 [R], of the chosen tokens; None when no row wants any.
        top_ids: int32 [R, K], likeliest first, equals by id; None if no row wants any. K is the
            largest number that a row asked for: of a row that asked for n, the first n count.
        top_logprobs: float32 [R, K].
    """

    tokens: mx.array
    logprobs: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

"""Converts scores to weights by the same arithmetic for generating rows and prompts.

In packed formats a token's codes depend on its attention in the layer below. If prompts were
rounded otherwise than generated tokens, a token that is read again (after preemption, or in a
longer prompt) might get another code, and so other logits.
"""

from __future__ import annotations

import mlx.core as mx


def capped(scores: mx.array, softcap: float | None) -> mx.array:
    """Return `softcap * tanh(scores / softcap)`; the scores unchanged without a cap."""
    return scores if softcap is None else softcap * mx.tanh(scores / softcap)


def attention_weights(scores: mx.array, bias: mx.array, sinks: mx.array | None) -> mx.array:
    """Return the weights of all keys of a row, of the scores' type.

    Args:
        scores: `[..., S]`.
        bias: 0 where visible, else minus infinity; broadcasts against them.
        sinks: `[..., 1]`, logits that take weight and give nothing; broadcasts likewise.
    """
    scores = scores + bias
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    extra = mx.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, extra], axis=-1), axis=-1, precise=True)[..., :-1]

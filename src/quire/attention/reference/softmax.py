"""From scores to weights, for generating rows and for prompts by the same arithmetic.

In packed formats a token's codes follow from its attention a layer below. If reading a prompt
rounded otherwise than generating does, a token that is read again (after a pre-emption, or as part
of a longer prompt) would now and then get another code, and with it other logits.
"""

from __future__ import annotations

import mlx.core as mx


def capped(scores: mx.array, softcap: float | None) -> mx.array:
    """`softcap * tanh(scores / softcap)`; the scores themselves without a cap."""
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

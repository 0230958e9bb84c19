"""Recurrent operations in MLX's operations, for devices without kernels for them.

Tokens of a sequence are advanced in order, `n` sequences of `t` tokens at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

UNIT_EPS = 1e-6
"""Epsilon for the lengths of keys and queries, as in the flash-linear-attention library."""

WAITING = ("changes", "change_keys", "change_factors")
"""Names of the parts of a delta net's state that hold updates which wait beside its "delta"."""

_PAIRS_CHUNK = 64  # tokens whose pairs `state_space` computes at once
_SCAN_CHUNK = 32  # tokens that `selective_scan` scans at once


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """How a gated delta net forgets and updates its state.

    With `x = steps + step_biases` a state keeps `exp(-exp(log_rates) * softplus(x))` of itself, or
    `exp(most_forgotten * sigmoid(exp(log_rates) * x))`. It takes in
    `most_correction * sigmoid(betas)` of the difference between a value and what it says of its
    key.

    Attributes:
        steps: `[n, t, value_heads]`, or `[n, t, value_heads, key_dim]` where each column of a state
            forgets by itself.
        betas: `[n, t, value_heads]`.
        log_rates: `[value_heads]`.
        step_biases: as the steps of a token, in one dimension.
        most_forgotten: below zero; None where there is no bound.
    """

    steps: mx.array
    betas: mx.array
    log_rates: mx.array
    step_biases: mx.array
    most_correction: float = 1.0
    most_forgotten: float | None = None


def waiting_parts(
    updates: int, values: tuple[int, int], keys: tuple[int, int]
) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return the parts of a delta net's state for updates that wait beside its "delta".

    An update `S' = a S + d k^T` is far smaller than the state `S`. While some wait, a step reads a
    state and writes an update. "changes" holds how many wait, then the `d` of each; "change_keys"
    holds their `k`, "change_factors" a place for nothing and then their `a`.

    Args:
        updates: the most that wait.
        values, keys: heads and size of each.

    Returns:
        Parts of a `RecurrentState`; none if no update may wait.
    """
    changes, change_keys, change_factors = WAITING
    parts: tuple[tuple[str, tuple[int, ...], str], ...] = (
        (changes, (*values, 1 + updates), "float32"),
        (change_keys, (updates, *keys), ""),
        (change_factors, (values[0], 1 + updates), "float32"),
    )
    return parts if updates else ()


def settled(
    state: mx.array, changes: mx.array, change_keys: mx.array, change_factors: mx.array
) -> mx.array:
    """Return states `[n, value_heads, value_dim, key_dim]` with all updates that wait.

    Args:
        state: the states without them.
        changes, change_keys, change_factors: `[n, *shape]`, see `waiting_parts`.
    """
    updates, heads = change_keys.shape[1], state.shape[1]
    keys = mx.repeat(change_keys.astype(state.dtype), heads // change_keys.shape[2], axis=2)
    count = changes[..., :1]
    # Slices: a number as an index is a gather, which a GPU would have to compile.
    for number in range(updates):
        change = changes[..., number + 1 : number + 2]
        key = keys[:, number : number + 1].swapaxes(1, 2)  # [n, heads, 1, key_dim]
        left = change_factors[..., number + 1 : number + 2, None]  # [n, heads, 1, 1]
        state = mx.where(count > number, state * left + change * key, state)
    return state


def causal_conv(window: mx.array, taps: mx.array, bias: mx.array | None) -> mx.array:
    """Apply one filter per channel over the last tokens.

    Args:
        window: `[n, kernel - 1 + t, channels]`.
        taps: `[channels, kernel]`.
        bias: `[channels]`.

    Returns:
        `[n, t, channels]`.
    """
    taps = taps.T  # [kernel, channels]
    kernel = taps.shape[0]
    t = window.shape[1] - kernel + 1
    if t == 1:
        out = (window * taps).sum(axis=1, keepdims=True)
    else:
        # Slices: a number as an index is a gather, which a GPU would have to compile.
        out = window[:, :t] * taps[:1]
        for offset in range(1, kernel):
            out = out + window[:, offset : offset + t] * taps[offset : offset + 1]
    return out if bias is None else out + bias


def delta_rule(
    mixed: mx.array, gates: DeltaGates, state: mx.array, key_heads: int, eps: float
) -> tuple[mx.array, mx.array]:
    """Compute `Operations.gated_delta` in MLX's operations."""
    n, t, _ = mixed.shape
    heads, value_dim, key_dim = state.shape[1:]
    keys = key_heads * key_dim
    q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
    advance = gated_delta if gates.steps.ndim == 3 else channel_delta
    return advance(
        unit(q.reshape(n, t, key_heads, key_dim), eps) * key_dim**-0.5,
        unit(k.reshape(n, t, key_heads, key_dim), eps),
        v.reshape(n, t, heads, value_dim),
        _decay(gates),
        mx.sigmoid(gates.betas) * gates.most_correction,
        state,
    )


def _decay(gates: DeltaGates) -> mx.array:
    """Return the decay factors of the recurrent states, float32, shaped as `gates.steps`."""
    steps = gates.steps.astype(mx.float32)
    steps = steps + gates.step_biases.reshape(steps.shape[2:])
    rates = mx.exp(gates.log_rates.astype(mx.float32))
    if steps.ndim == 4:
        rates = rates[:, None]
    if gates.most_forgotten is not None:
        return mx.exp(gates.most_forgotten * mx.sigmoid(rates * steps))
    return mx.exp(-rates * mx.logaddexp(steps, 0.0))


def unit(x: mx.array, eps: float) -> mx.array:
    """Return `x / sqrt(sum(x ** 2) + eps)` over the last axis, by the fused norm."""
    dim = x.shape[-1]
    normed: mx.array = mx.fast.rms_norm(x, None, eps / dim)
    return normed * (1 / math.sqrt(dim))


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, kept: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """For each token: forget, compare the value at `k` with `v`, correct it by `beta`, read at `q`.

    Args:
        q, k: `[n, t, key_heads, key_dim]`; each serves consecutive value heads.
        v: `[n, t, value_heads, value_dim]`.
        kept: `[n, t, value_heads]`, in (0, 1); multiplies the state.
        beta: `[n, t, value_heads]`, in (0, 2).
        state: `[n, value_heads, value_dim, key_dim]`, float32.

    Returns:
        `[n, t, value_heads, value_dim]` and the state after the last token.
    """
    # Not by matrix products over chunks of tokens (the paper's section 3.3), which read a prompt
    # faster on a CPU: their last bits depend on where it is cut, and turn a packed cache's codes.
    y, state = mx.fast.gated_delta_update(q, k, v, kept, beta, initial_state=state)
    return y, state


def channel_delta(
    q: mx.array, k: mx.array, v: mx.array, kept: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`gated_delta` where each column of a state forgets by itself.

    Args:
        q, k: `[n, t, heads, key_dim]`.
        v: `[n, t, heads, value_dim]`.
        kept: `[n, t, heads, key_dim]`, in (0, 1); multiplies the columns of the state.
        beta: `[n, t, heads]`, in (0, 2).
        state: `[n, heads, value_dim, key_dim]`, float32.

    Returns:
        `[n, t, heads, value_dim]` and the state after the last token.
    """
    # Token by token, so that its last bits do not depend on where a prompt is cut; MLX's fused
    # delta rule forgets by head alone.
    written = k * beta[..., None]
    rows = (mx.split(each, each.shape[1], axis=1) for each in (q, k, written, kept))
    values = mx.split(v[..., None], v.shape[1], axis=1)
    outputs = []
    for query, key, change, left, value in zip(*rows, values, strict=True):
        # Rows stand over the columns of a state, `[n, heads, 1, key_dim]`.
        state = state * left.swapaxes(1, 2)
        error = value.squeeze(1) - (state * key.swapaxes(1, 2)).sum(axis=-1, keepdims=True)
        state = state + error * change.swapaxes(1, 2)
        outputs.append((state * query.swapaxes(1, 2)).sum(axis=-1))
    return mx.stack(outputs, axis=1), state


def state_space(
    values: mx.array,
    keys: mx.array,
    queries: mx.array,
    steps: mx.array,
    rates: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Compute `Operations.state_space` in MLX's operations."""
    if rates.ndim == 1:
        return grouped_state_space(values, keys, queries, steps=steps, rates=rates, state=state)
    y, after = selective_scan(
        values.squeeze(-1),
        keys.squeeze(2),
        queries.squeeze(2),
        steps=steps,
        rates=rates,
        state=state.squeeze(2),
    )
    return y[..., None], after[:, :, None]


def grouped_state_space(
    values: mx.array,
    keys: mx.array,
    queries: mx.array,
    steps: mx.array,
    rates: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Compute `Operations.state_space` with one rate per head, many tokens at once."""
    copies = values.shape[2] // keys.shape[2]
    keys, queries = mx.repeat(keys, copies, axis=2), mx.repeat(queries, copies, axis=2)
    log_decay = rates * steps
    outputs = []
    for start in range(0, values.shape[1], _PAIRS_CHUNK):
        part = slice(start, start + _PAIRS_CHUNK)
        v, k, q = (each[:, part].swapaxes(1, 2) for each in (values, keys, queries))
        past = mx.cumsum(log_decay[:, part].swapaxes(1, 2), axis=-1)  # [n, heads, t]
        causal = mx.tri(past.shape[-1], dtype=mx.bool_)
        between = mx.where(causal, past[..., :, None] - past[..., None, :], -mx.inf)
        pairs = (q @ k.swapaxes(-1, -2)) * mx.exp(between)  # [n, heads, t, t]
        y = pairs @ v + (q * mx.exp(past)[..., None]) @ state.swapaxes(-1, -2)
        left = mx.exp(past[..., -1:] - past)  # of what each token added, after the last
        state = state * mx.exp(past[..., -1])[..., None, None] + (
            (v * left[..., None]).swapaxes(-1, -2) @ k
        )
        outputs.append(y.swapaxes(1, 2))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), state


def selective_scan(
    values: mx.array,
    keys: mx.array,
    queries: mx.array,
    steps: mx.array,
    rates: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Advance the states: for each token and channel, decay the state, add the value at the key,
    and read at the query.

    Args:
        values: `[n, t, channels]`.
        keys, queries: `[n, t, state_dim]`, B and C in the paper.
        steps: `[n, t, channels]`, at least 0; together with `rates`, they determine the decay.
        rates: `[channels, state_dim]`, below 0.
        state: `[n, channels, state_dim]`. All are float32.

    Returns:
        `[n, t, channels]` and the state after the last token.
    """
    outputs = []
    for start in range(0, values.shape[1], _SCAN_CHUNK):
        part = slice(start, start + _SCAN_CHUNK)
        kept = mx.exp(steps[:, part, :, None] * rates)  # [n, t, channels, state_dim]
        added = values[:, part, :, None] * keys[:, part, None]
        added[:, 0] = added[:, 0] + kept[:, 0] * state
        added = _scanned(kept, added)
        outputs.append((added @ queries[:, part, :, None]).squeeze(-1))
        state = added[:, -1]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), state


def _scanned(kept: mx.array, added: mx.array) -> mx.array:
    """Return the states `s[t] = kept[t] * s[t - 1] + added[t]` along axis 1, from zero.

    Spans are joined with those before them, twice as long each time (Hillis and Steele, 1986).
    """
    span, tokens = 1, kept.shape[1]
    while span < tokens:
        joined = added[:, span:] + kept[:, span:] * added[:, :-span]
        added = mx.concatenate([added[:, :span], joined], axis=1)
        kept = mx.concatenate([kept[:, :span], kept[:, span:] * kept[:, :-span]], axis=1)
        span *= 2
    return added

"""Routers: the choice of experts for each row, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.device.device import current_device


@dataclass(frozen=True)
class SoftmaxRouter:
    """The k most probable experts, weighted by their probabilities.

    Attributes:
        normalise: the weights of the chosen sum to one.
        corrected: a bias is added to the probabilities for the choice, not for the weights.
        scale: multiplies the weights.
        groups, best_groups: experts stand in so many groups, of which so many are open to a row;
            a group counts as much as so many of its best experts as `counted` says.
    """

    k: int
    normalise: bool
    corrected: bool = False
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    counted: int = 1

    def route(self, logits: mx.array, correction: mx.array | None) -> tuple[mx.array, mx.array]:
        grouped = self.best_groups < self.groups
        ranked = logits  # in the order of probabilities, which take part in sums
        if correction is not None or (grouped and self.counted > 1):
            ranked = mx.softmax(logits, axis=-1)
        if correction is not None:
            ranked = ranked + correction
        if grouped:
            ranked = within_groups(ranked, self.groups, self.best_groups, self.counted)
        chosen, _ = top_experts(ranked, self.k)
        own = current_device().operations.of_rows(logits, chosen)
        if self.normalise:
            # A softmax over all, cut to the chosen and scaled to one, is one over the chosen.
            weights = mx.softmax(own, axis=-1)
        else:
            weights = mx.exp(own - mx.logsumexp(logits, axis=-1, keepdims=True))
        return chosen, weights if self.scale == 1 else weights * self.scale


@dataclass(frozen=True)
class SigmoidRouter:
    """DeepSeek V3's (arXiv:2412.19437, section 2.1.2): the k best of the best groups of experts.

    Attributes:
        normalise: the weights of the chosen sum to one, before they are scaled.
        scale: multiplies the weights.
        groups, best_groups: experts stand in so many groups, of which so many are open to a row;
            a group counts as much as its two best experts.
        softcap: bounds the logits by a hyperbolic tangent; 0 leaves them.
    """

    k: int
    normalise: bool
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    corrected: bool = True
    softcap: float = 0.0

    def route(self, logits: mx.array, correction: mx.array | None) -> tuple[mx.array, mx.array]:
        if self.softcap:
            logits = mx.tanh(logits / self.softcap) * self.softcap
        scores = mx.sigmoid(logits)
        grouped = self.best_groups < self.groups
        ranked = scores if correction is None else scores + correction
        if correction is None and not grouped:
            ranked = logits  # which differ where their sigmoids are all 1
        if grouped:
            ranked = within_groups(ranked, self.groups, self.best_groups, 2)
        chosen, _ = top_experts(ranked, self.k)
        weights = current_device().operations.of_rows(scores, chosen)
        if self.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return chosen, weights * self.scale


@dataclass(frozen=True)
class SparseMixer:
    """Two experts, one after the other, each weighted among its near rivals (arXiv:2409.12136).

    Attributes:
        jitter: rivals are those whose logits are within twice this share of the best.
    """

    jitter: float
    corrected: bool = False

    @property
    def k(self) -> int:
        return 2

    def route(self, logits: mx.array, correction: mx.array | None) -> tuple[mx.array, mx.array]:
        first, first_weight = self._best(logits, logits)
        index = mx.arange(logits.shape[-1])
        second, second_weight = self._best(mx.where(index == first, -mx.inf, logits), logits)
        chosen = mx.concatenate([first, second], axis=-1)
        return chosen, mx.concatenate([first_weight, second_weight], axis=-1)

    def _best(self, open_logits: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Return the best of the open experts and its weight, `[T, 1]` each."""
        chosen = mx.argmax(open_logits, axis=-1, keepdims=True).astype(mx.int32)
        best = current_device().operations.of_rows(open_logits, chosen)
        distance = (best - logits) / mx.maximum(mx.abs(logits), best)
        rivals = mx.where(distance > 2 * self.jitter, -mx.inf, open_logits)
        return chosen, mx.exp(best - mx.logsumexp(rivals, axis=-1, keepdims=True))


def within_groups(ranked: mx.array, groups: int, best: int, counted: int) -> mx.array:
    """Return the same, `[T, experts]`, with experts out of the best groups ranked last.

    Args:
        counted: how many of its best experts a group's worth is the sum of.
    """
    grouped = ranked.reshape(ranked.shape[0], groups, -1)
    worth = mx.topk(grouped, counted, axis=-1).sum(axis=-1)  # [T, groups]
    least = mx.topk(worth, best, axis=-1).min(axis=-1, keepdims=True)
    return mx.where((worth >= least)[..., None], grouped, -mx.inf).reshape(ranked.shape)


def top_experts(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return the k highest of `[T, experts]`: (indices `[T, k]`, scores `[T, k]`), in no order.

    Indices have the device's `Operations.index_type`.
    """
    operations = current_device().operations
    indices = mx.argpartition(scores, kth=-k, axis=-1)[:, -k:].astype(operations.index_type)
    return indices, operations.of_rows(scores, indices)

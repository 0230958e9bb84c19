"""Routers: select experts for each row, and compute their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from quire.device.device import current_device, fused
from quire.device.mixture import Routing


@dataclass(frozen=True)
class SoftmaxRouter:
    """Selects the k most probable experts, weighted by their probabilities.

    Attributes:
        normalise: whether the selected experts' weights are normalised to sum to one.
        corrected: whether a bias is added to the probabilities for the selection, but not for the
            weights.
        scale: factor of the weights.
        groups, best_groups: number of groups of experts, and of the best groups that a row may use.
            A group's score is the sum of its `counted` best experts.
    """

    k: int
    normalise: bool
    corrected: bool = False
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    counted: int = 1

    @property
    def routing(self) -> Routing:
        return Routing(
            self.k,
            sigmoid=False,
            normalise=self.normalise,
            scale=self.scale,
            groups=self.groups,
            best_groups=self.best_groups,
            counted=self.counted,
        )

    def route(self, logits: mx.array, correction: mx.array | None) -> tuple[mx.array, mx.array]:
        grouped = self.best_groups < self.groups
        ranked = (
            logits  # logits have the order of probabilities; sums need the probabilities themselves
        )
        if correction is not None or (grouped and self.counted > 1):
            ranked = mx.softmax(logits, axis=-1)
        if correction is not None:
            ranked = ranked + correction
        if grouped:
            ranked = within_groups(ranked, self.groups, self.best_groups, counted=self.counted)
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
    """Selects the k best experts of the best groups, as DeepSeek V3 (arXiv:2412.19437, section
    2.1.2).

    Attributes:
        normalise: whether the weights are normalised to sum to one before they are scaled.
        scale: factor of the weights.
        groups, best_groups: number of groups of experts, and of the best groups that a row may use.
            A group's score is the sum of its two best experts.
        softcap: softcap of the logits, by a hyperbolic tangent; 0 means none.
    """

    k: int
    normalise: bool
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    corrected: bool = True
    softcap: float = 0.0

    @property
    def routing(self) -> Routing:
        return Routing(
            self.k,
            sigmoid=True,
            normalise=self.normalise,
            scale=self.scale,
            softcap=self.softcap,
            groups=self.groups,
            best_groups=self.best_groups,
            counted=2,
        )

    def route(self, logits: mx.array, correction: mx.array | None) -> tuple[mx.array, mx.array]:
        if self.softcap:
            logits = current_device().operations.tanh(logits / self.softcap) * self.softcap
        scores = mx.sigmoid(logits)
        grouped = self.best_groups < self.groups
        ranked = scores if correction is None else scores + correction
        if correction is None and not grouped:
            ranked = logits  # which differ where their sigmoids are all 1
        if grouped:
            ranked = within_groups(ranked, self.groups, self.best_groups, counted=2)
        chosen, _ = top_experts(ranked, self.k)
        weights = current_device().operations.of_rows(scores, chosen)
        if not self.normalise:
            return chosen, weights * self.scale
        return chosen, _shared_out(self.scale)(weights, weights.sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class SparseMixer:
    """Selects two experts, one after the other, each weighted among its close rivals
    (arXiv:2409.12136).

    Attributes:
        jitter: experts are rivals if their logits are within twice this share of the best.
    """

    jitter: float
    corrected: bool = False

    @property
    def k(self) -> int:
        return 2

    @property
    def routing(self) -> None:
        """None: experts are chosen one after the other."""

    def route(self, logits: mx.array, correction: mx.array | None) -> tuple[mx.array, mx.array]:
        first, first_weight = self._best(logits, logits)
        index = mx.arange(logits.shape[-1])
        second, second_weight = self._best(mx.where(index == first, -mx.inf, logits), logits)
        chosen = mx.concatenate([first, second], axis=-1)
        return chosen, mx.concatenate([first_weight, second_weight], axis=-1)

    def _best(self, open_logits: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Return the best of the open experts, and its weight, each `[T, 1]`."""
        chosen, best = top_experts(open_logits, 1)
        distance = (best - logits) / mx.maximum(mx.abs(logits), best)
        rivals = mx.where(distance > 2 * self.jitter, -mx.inf, open_logits)
        return chosen, mx.exp(best - mx.logsumexp(rivals, axis=-1, keepdims=True))


def within_groups(ranked: mx.array, groups: int, best: int, counted: int) -> mx.array:
    """Return scores `[T, experts]` with experts outside the best groups set to minus infinity.

    Args:
        counted: number of best experts whose scores add up to a group's score.
    """
    grouped = ranked.reshape(ranked.shape[0], groups, -1)
    worth = mx.topk(grouped, counted, axis=-1).sum(axis=-1)  # [T, groups]
    place = groups - best  # of the least of the best groups, in ascending order
    least = mx.partition(worth, place, axis=-1)[:, place : place + 1]
    return _of_best(grouped, worth[..., None], least[..., None]).reshape(ranked.shape)


@fused
def _of_best(scores: mx.array, worth: mx.array, least: mx.array) -> mx.array:
    """Return scores, with minus infinity in groups that are worth less than `least`."""
    return mx.where(worth >= least, scores, -mx.inf)


@cache
def _shared_out(scale: float) -> Callable[[mx.array, mx.array], mx.array]:
    """Return a function that divides weights by their sum and multiplies them by `scale`."""
    return fused(lambda weights, total: weights / (total + 1e-20) * scale)


def top_experts(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return indices and scores, `[T, k]` each, of the k highest of `[T, experts]`, in no order.

    Of equal scores the last ones are chosen on every device, as kernels choose them, because MLX
    partitions in a stable order. Indices have the device's `Operations.index_type`.
    """
    operations = current_device().operations
    indices = mx.argpartition(scores, kth=-k, axis=-1)[:, -k:].astype(operations.index_type)
    return indices, operations.of_rows(scores, indices)

"""A draft head: multi-token prediction without attention.

As in DeepSeek-V3 (arXiv:2412.19437, section 2.2), a token's hidden state and the embedding of the
next token give the next token's state, and so on. The head has no attention and thus no keys and
values. Its file is in the model's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError
from quire.device.device import current_device
from quire.device.weights import TILE, Packing, in_tiles
from quire.models.base import LanguageModel, Module, named_parameters
from quire.models.layers.common import GATES, embed
from quire.models.layers.linear import packed_layer, use_device_products
from quire.models.layers.norm import RMSNorm, UnweightedNorm
from quire.models.weights.layouts import narrowed

FILE = Path("draft_head") / "model.safetensors"
"""Path of the draft head's weights within a model's folder."""
_EPS = 1e-6
_PACKING = Packing(64, 8, "affine")
"""Packing of a head's matrices where kernels read it. A wrong guess changes no answer, and guesses
in 8 bits are right as often.
"""


class DraftHead(Module):
    """The draft head, with names as `training.draft_head` saves them.

    Args:
        hidden: width of the model.
        width: inner width of the head's MLP.
        words: number of tokens that it chooses guesses from; 0 for all.
    """

    def __init__(self, hidden: int, width: int, words: int = 0) -> None:
        super().__init__()
        self.tokens = mx.zeros((words,), dtype=mx.int32) if words else None
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)
        self.norm = RMSNorm(hidden, _EPS)
        self._unit = UnweightedNorm(_EPS)

    def unit(self, state: mx.array) -> mx.array:
        """Return states or embeddings `[N, hidden]` as `fc` takes them."""
        return self._unit(state)

    def after(self, x: mx.array) -> mx.array:
        """Return the state after one more token, `[N, hidden]`, as input of `LanguageModel.logits`.

        Args:
            x: output of `fc` for the normalised state of the previous token and, behind it, the
                embedding of the token; `[N, hidden]`.
        """
        y = self._unit(x)
        after: mx.array = self.norm(x + self.down(GATES["silu"](self.gate(y), self.up(y))))
        return after


class GuessStep(Module):
    """One step of a draft head, from a state and a token to the next state and its logits.

    The part of `fc` that reads embeddings is applied to the whole table once. A head that chooses
    from some tokens multiplies by their embeddings alone.

    Args:
        model: the model, whose embeddings and logits the head uses.

    Attributes:
        tokens: `[words, 1]` ids of the tokens that its logits belong to; None for all, in order.
        followed: `[vocab, hidden]`, what each token adds to the projected state before it.
    """

    def __init__(self, model: LanguageModel, head: DraftHead) -> None:
        super().__init__()
        self.head = head
        hidden = head.norm.weight.shape[-1]
        self.fc = nn.Linear(hidden, hidden, bias=False)
        self.tokens = None if head.tokens is None else head.tokens[:, None]
        if head.tokens is None:
            self.model = model
        else:
            self.words = nn.Linear(hidden, len(head.tokens), bias=False)
        use_device_products(self)
        self.fc.weight = mx.contiguous(head.fc.weight[:, :hidden])
        vocab = mx.arange(model.vocab_size)
        table, dtype = model.model.embed_tokens, head.norm.weight.dtype
        unit = UnweightedNorm(_EPS)(embed(table, vocab, dtype))
        self.followed = unit @ head.fc.weight[:, hidden:].T.astype(unit.dtype)
        self.fc = _packed(self.fc)
        if head.tokens is not None:
            self.words.weight = embed(table, head.tokens, dtype)
            self.words = _packed(self.words)
            mx.eval(self.words.parameters())
        mx.eval(self.fc.parameters(), self.followed)

    def __call__(self, state: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the states after the tokens, `[R, hidden]`, the likeliest next tokens, `[R]`, and
        their probabilities, `[R]`.

        Args:
            state: `[R, hidden]`, of the tokens before.
            tokens: int32 `[R]`.
        """
        operations = current_device().operations
        after, logits = self.ahead(state, tokens)
        best, chance = operations.likeliest(logits)
        if self.tokens is None:
            return after, best, chance
        return after, operations.embed(best, self.tokens, dtype=None)[:, 0], chance

    def ahead(self, state: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Return the states after the tokens, `[R, hidden]`, and logits of the next ones.

        Arguments are those of a call.
        """
        followed = current_device().operations.embed(tokens, self.followed, dtype=None)
        after = self.head.after(self.fc(self.head.unit(state)) + followed)
        return after, self.model.logits(after) if self.tokens is None else self.words(after)


class Guesses(Module):
    """Several steps of a draft head, each from the state and the guess of the one before.

    Args:
        count: number of guesses.
    """

    def __init__(self, step: GuessStep, count: int) -> None:
        super().__init__()
        self.step, self.count = step, count

    def __call__(self, state: mx.array, tokens: mx.array) -> list[mx.array]:
        """Return the guesses after `tokens`, int32 `[R, count]`, and the probability of each if
        those before it are right, float32 `[R, count]`.

        Args:
            state: normalised states `[R, hidden]` from which `tokens`, int32 `[R]`, were sampled.
        """
        guesses, chances = list[mx.array](), list[mx.array]()
        for _ in range(self.count):
            state, tokens, chance = self.step(state, tokens)
            guesses.append(tokens)
            chances.append(chance)
        return [mx.stack(guesses, axis=1), mx.stack(chances, axis=1)]


Compute = Callable[[mx.array, mx.array], Sequence[mx.array]]
"""Computes `Guesses`."""


class TokenGuesser:
    """A model's draft head. It guesses in the same step that samples the token before its guesses.

    Args:
        faster: returns what computes the same as some guesses in less time, or None.
    """

    def __init__(
        self, step: GuessStep, faster: Callable[[Guesses], Compute | None] = lambda guesses: None
    ) -> None:
        self.step = step
        self._faster = faster
        self._made: dict[int, Compute] = {}

    def computing(self, count: int) -> Compute:
        """Return what computes so many guesses."""
        if count not in self._made:
            guesses = Guesses(self.step, count)
            self._made[count] = self._faster(guesses) or guesses
        return self._made[count]

    def __call__(
        self, state: mx.array, tokens: mx.array, count: int, least: float = 0.0
    ) -> mx.array:
        """Return `count` guesses as far as they are likely; see `Guesses` and `likely_only`.

        Args:
            least: the least probability of a likely one, all before it included; 0 for all.
        """
        guesses, chances = self.computing(count)(state, tokens)
        if not least:
            return guesses
        return current_device().operations.likely_only(guesses, chances, least)


def open_draft_head(folder: Path, model: LanguageModel) -> DraftHead | None:
    """Load the draft head of a model's folder in the model's dtype; None if there is none.

    Raises:
        ModelError: the file does not fit the model.
    """
    path = folder / FILE
    if not path.exists():
        return None
    weights: Any = mx.load(str(path))
    own = model.model.norm.weight.shape[-1]  # a packed table is narrower than its rows
    try:
        width, hidden = weights["gate.weight"].shape
        words = len(weights["tokens"]) if "tokens" in weights else 0
        head = DraftHead(hidden, width, words)
        use_device_products(head)
        head.load_weights(list(weights.items()))
    except (KeyError, ValueError) as error:
        raise ModelError(f"{path}: no draft head, or another kind: {error}") from error
    if hidden != own:
        raise ModelError(f"{path}: it takes hidden states of {hidden}, the model has {own}")
    head.set_dtype(model.model.norm.weight.dtype)
    head.fc.weight = narrowed(head.fc.weight)
    head.gate, head.up, head.down = (_packed(layer) for layer in (head.gate, head.up, head.down))
    mx.eval(list(named_parameters(head).values()))
    return head


def _packed(layer: nn.Linear) -> Any:
    """Return a layer without bias with packed weights, in tiles as the device's kernels read them.

    The layer itself, `narrowed`, if there are no such kernels, or if groups or tiles would not be
    full.
    """
    outputs, inputs = layer.weight.shape
    fits = inputs % _PACKING.group_size == outputs % TILE == 0
    kernels = current_device().kernels is not None
    if not (fits and kernels and current_device().operations.reads_tiles(_PACKING)):
        layer.weight = narrowed(layer.weight)
        return layer
    packed: Any = packed_layer(layer, _PACKING)
    packed.update({name: in_tiles(array) for name, array in packed.parameters().items()})
    packed.tiled = True
    return packed

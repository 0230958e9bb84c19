"""A draft head: multi-token prediction without attention.

As in DeepSeek-V3 (arXiv:2412.19437, section 2.2), a token's hidden state and the embedding of the
next token give the next token's state, and so on. The head has no attention and thus no keys and
values. Its file is in the model's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError
from quire.models.base import LanguageModel, Module, named_parameters
from quire.models.layers.common import embed
from quire.models.layers.linear import use_device_products
from quire.models.layers.norm import RMSNorm, UnweightedNorm

FILE = Path("draft_head") / "model.safetensors"
"""Path of the draft head's weights within a model's folder."""
_EPS = 1e-6


class DraftHead(Module):
    """The draft head, with names as `training.draft_head` saves them.

    Args:
        hidden: width of the model.
        width: inner width of the head's MLP.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)
        self.norm = RMSNorm(hidden, _EPS)
        self._unit = UnweightedNorm(_EPS)

    def __call__(self, state: mx.array, embedding: mx.array) -> mx.array:
        """Return the state after one more token, `[N, hidden]`, as input of `LanguageModel.logits`.

        Args:
            state: normalised state of the previous token, `[N, hidden]`.
            embedding: embedding of the token, `[N, hidden]`.
        """
        joined = mx.concatenate([self._unit(state), self._unit(embedding)], axis=-1)
        x = self.fc(joined)
        y = self._unit(x)
        after: mx.array = self.norm(x + self.down(nn.silu(self.gate(y)) * self.up(y)))
        return after


class TokenGuesser:
    """A model with its draft head. Drafts tokens in the same step that samples the token before
    them.
    """

    def __init__(self, model: LanguageModel, head: DraftHead) -> None:
        self._model = model
        self._head = head

    def __call__(self, state: mx.array, tokens: mx.array, count: int) -> mx.array:
        """Return the drafts after `tokens`, int32 `[R, count]`.

        Args:
            state: normalised states `[R, hidden]` from which `tokens`, `[R]`, were sampled.
        """
        table = self._model.model.embed_tokens
        guesses: list[mx.array] = []
        for _ in range(count):
            state = self._head(state, embed(table, tokens, state.dtype))
            tokens = mx.argmax(self._model.logits(state), axis=-1).astype(mx.int32)
            guesses.append(tokens)
        return mx.stack(guesses, axis=1)


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
        head = DraftHead(hidden, width)
        use_device_products(head)
        head.load_weights(list(weights.items()))
    except (KeyError, ValueError) as error:
        raise ModelError(f"{path}: no draft head, or another kind: {error}") from error
    if hidden != own:
        raise ModelError(f"{path}: it takes hidden states of {hidden}, the model has {own}")
    head.set_dtype(model.model.norm.weight.dtype)
    mx.eval(list(named_parameters(head).values()))
    return head

"""A head that guesses tokens ahead of a model: multi-token prediction without attention.

After DeepSeek-V3's (arXiv:2412.19437, section 2.2): from the hidden state of a token and the
embedding of the token that follows it comes the state of the latter, and so on. There is no layer
of attention, so a head has no keys and values. It lies beside the model's weights.
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
    """The head, named as `training.draft_head` saves it.

    Args:
        hidden: width of the model.
        width: of the head's MLP.
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
        """Return the state after one more token, `[N, hidden]`, as `LanguageModel.logits` takes it.

        Args:
            state: `[N, hidden]`, normalised, of the token before.
            embedding: `[N, hidden]` of the token.
        """
        joined = mx.concatenate([self._unit(state), self._unit(embedding)], axis=-1)
        x = self.fc(joined)
        y = self._unit(x)
        after: mx.array = self.norm(x + self.down(nn.silu(self.gate(y)) * self.up(y)))
        return after


class TokenGuesser:
    """A model with its head: guesses tokens in the step that draws the ones before them."""

    def __init__(self, model: LanguageModel, head: DraftHead) -> None:
        self._model = model
        self._head = head

    def __call__(self, state: mx.array, tokens: mx.array, count: int) -> mx.array:
        """Return the tokens expected after `tokens`, int32 `[R, count]`.

        Args:
            state: `[R, hidden]`, normalised, from which `tokens` were drawn, `[R]`.
        """
        table = self._model.model.embed_tokens
        guesses: list[mx.array] = []
        for _ in range(count):
            state = self._head(state, embed(table, tokens, state.dtype))
            tokens = mx.argmax(self._model.logits(state), axis=-1).astype(mx.int32)
            guesses.append(tokens)
        return mx.stack(guesses, axis=1)


def open_draft_head(folder: Path, model: LanguageModel) -> DraftHead | None:
    """Return the head in a model's folder, in the model's type; None if there is none.

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

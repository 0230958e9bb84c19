"""The drafter that guesses by the model's own hidden states, with a head beside the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from quire.core.speculation import HEAD
from quire.models.base import LanguageModel
from quire.models.draft_head import DraftHead
from quire.models.layers.common import embed
from quire.scheduler.drafts import Draft, DraftQuery

_MOST = 4
"""Tokens that a head guesses in a row; further ones are seldom right."""


class HeadDrafter:
    """Drafts with a head: for all sequences at once, one token after the other.

    Args:
        head: of `model`.
    """

    name = HEAD
    looks_ahead = False

    def __init__(self, head: DraftHead, model: LanguageModel) -> None:
        self._head = head
        self._model = model
        self._hidden: mx.array | None = None
        self._rows: Mapping[int, tuple[int, int]] = {}

    def observe(self, hidden: mx.array | None, rows: Mapping[int, tuple[int, int]]) -> None:
        """Take the final hidden states of a step that is done.

        Args:
            hidden: `[R, hidden]` of the sampled rows, normalised; None if the step kept none.
            rows: by sequence number, its first row, and the position of the token drawn from it.
        """
        self._hidden, self._rows = hidden, rows

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(queries)
        rows = [self._row(each) for each in queries]
        known = [(place, row) for place, row in enumerate(rows) if row >= 0]
        if self._hidden is None or not known:
            return drafts
        table, dtype = self._model.model.embed_tokens, self._hidden.dtype
        state = self._hidden[mx.array([row for _, row in known])]
        tokens = mx.array([queries[place].tokens[-1] for place, _ in known])
        guesses: list[mx.array] = []
        for _ in range(min(_MOST, max(queries[place].limit for place, _ in known))):
            state = self._head(state, embed(table, tokens, dtype))
            tokens = mx.argmax(self._model.logits(state), axis=-1)
            guesses.append(tokens)
        found = np.array(mx.stack(guesses, axis=1)).tolist()
        for (place, _), guessed in zip(known, found, strict=True):
            drafts[place] = Draft(tuple(guessed[: queries[place].limit]), self.name)
        return drafts

    def forget(self, number: int) -> None:
        pass

    def _row(self, query: DraftQuery) -> int:
        """Return the row from which the sequence's last token was drawn; -1 if it is not there."""
        first, position = self._rows.get(query.number, (-1, 0))
        return first if first < 0 else first + len(query.tokens) - 1 - position

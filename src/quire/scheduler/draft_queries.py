"""Questions to drafters, and what they found for each sequence. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.scheduler.draft_lengths import Candidate, most_drafts
from quire.scheduler.drafts import Draft, Drafter, DraftQuery, DraftState
from quire.scheduler.sequence import Sequence

_READ_FOR = 128
"""Most steps over which a drafter's reading of a prompt is spread. Few answers are as long as they
may be.
"""


class Found(NamedTuple):
    """A candidate and its draft, which is None until it is made."""

    candidate: Candidate
    draft: Draft | None = None


class Asked(NamedTuple):
    """A sequence to draft for, and its query."""

    sequence: Sequence
    state: DraftState
    query: DraftQuery

    def reading_s(self, drafter: Drafter) -> float:
        """Return the seconds that a drafter must read of the sequence for each step that may be
        left.
        """
        return drafter.reading_s(self.query) / max(1, min(_READ_FOR, self.sequence.tokens_left))

    def possible(self, draft: Draft, vocab_size: int) -> Draft | None:
        """Return a draft without its tail that cannot be right; None if nothing is left."""
        draft, stops = draft.first(self.query.limit), self.query.request.stop_token_ids
        for place, token in enumerate(draft.tokens):
            if not 0 <= token < vocab_size:
                draft = draft.first(place)
                break
            if token in stops:
                draft = draft.first(place + 1)
                break
        return draft if draft.tokens else None


def asked_of(limits: Seq[tuple[Sequence, int]]) -> list[Asked]:
    """Return the queries of sequences that have drafters and room for drafts.

    Args:
        limits: each sequence, and the most tokens to draft for it.
    """
    asked = []
    most = 1 + most_drafts(len(limits))  # the first draft may be of a token on the device
    for sequence, limit in limits:
        state, progress, node = sequence.drafting, sequence.progress, sequence.prefix.node
        if state is None or limit < 1:
            continue
        query = DraftQuery(
            sequence.number,
            sequence.request,
            tokens=progress.tokens,
            content=progress.content,
            node=node,
            node_end=0 if node is None else sequence.prefix.registered * node.index.block_size,
            limit=min(limit, most + progress.unsettled),
        )
        asked.append(Asked(sequence, state, query))
    return asked


def keep_likelier(best: dict[int, Found], asked: Asked, found: Found) -> None:
    """Keep a sequence's draft if it is likelier than the one before it."""
    known = best.get(asked.query.number)
    if known is None or known.candidate.rate < found.candidate.rate:
        best[asked.query.number] = found

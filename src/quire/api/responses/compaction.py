"""OpenAI's `/v1/responses/compact`: a conversation becomes the user's messages and a summary.

The model writes the summary, and the client carries it packed, as it carries reasoning. In a later
input it stands for what it sums up.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from quire.api.responses.items import WireEvent
from quire.api.responses.render import usage_body
from quire.api.responses.said import read_said, truncated
from quire.api.responses.schema import CompactRequest, MessageItem
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.context import Context
from quire.api.shared.pieces import Array
from quire.api.shared.signing import Signer
from quire.api.shared.template_messages import merge
from quire.serving.generation import Prepared, Thinking
from quire.serving.messages import TemplateMessage
from quire.text.events import Usage

_ASK: TemplateMessage = {
    "role": "user",
    "content": "Summarize our conversation so that you could continue it from the summary alone: "
    "what was asked, what was found and decided, names, numbers and paths that matter, and what is "
    "still to be done. Only output the summary.",
}
_SHARE = 8
"""Divisor of the context that gives the most tokens of a summary."""
_REPEATS = 16
"""Exact repeats of a cycle of tokens that end a summary, which is greedy."""


@dataclass(frozen=True, slots=True)
class Compacting:
    """A request for a summary, read.

    Attributes:
        kept: the user's messages.
    """

    prepared: Prepared
    kept: Sequence[StoredItem]


async def read_compaction(context: Context, request: Request, body: bytes) -> Compacting:
    """Read the body of `POST /v1/responses/compact`."""
    fields = context.parse(request, body, CompactRequest)
    said = read_said(context, fields, request)
    spec = replace(
        said.prompt,
        messages=tuple(merge([*said.prompt.messages, _ASK])),
        tools=(),
        strict_tools=frozenset(),
        format=None,
        thinking=Thinking(enabled=False),
        show_reasoning=False,
        sampling=replace(context.service.sampling, temperature=0.0),
        max_tokens=max(1, context.service.info.context_length // _SHARE),
        stop_on_loop=_REPEATS,
        adapter=context.adapter(fields.model),
    )
    kept = tuple(each for each in said.items if _is_users(each))
    return Compacting(await context.prepare(await truncated(context, spec)), kept)


def _is_users(stored: StoredItem) -> bool:
    if stored.kind != "message":
        return False
    item = stored.read()
    return isinstance(item, MessageItem) and item.role == "user"


def compacted(asked: Compacting, summary: str, usage: Usage, signer: Signer) -> WireEvent:
    """Return the answer, for `pieces` to write."""
    item = {
        "id": f"cmp_{uuid.uuid4().hex}",
        "type": "compaction",
        "encrypted_content": signer.pack(summary.strip()),
    }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": Array([*asked.kept, item]),
        "usage": usage_body(usage),
    }

"""Forms with files (multipart/form-data)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.types import Message

from quire.api.shared.storage import storage
from quire.core.errors import TooLarge

_FIELDS = 1 << 20
"""Most bytes of a form beside its files."""


@asynccontextmanager
async def read_form(request: Request, limit: int, max_fields: int) -> AsyncIterator[FormData]:
    """Read a form with one file of at most `limit` bytes.

    A file over 1 MiB is in the folder of temporary files until the context ends.

    Raises:
        TooLarge: the file is larger.
        StorageFailed: the folder of temporary files cannot be used.
    """
    left = limit + _FIELDS

    async def receive() -> Message:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise TooLarge(f"The file is larger than {limit:,} bytes.", code="file_too_large")
        return message

    with storage("folder of temporary files"):
        async with Request(request.scope, receive).form(max_files=1, max_fields=max_fields) as form:
            yield form

"""Tasks that end with whoever started them."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and returns when they have ended.

    Nothing of them runs on, or holds anything, behind their owner's back. What they raise is not
    raised here.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)

"""Child processes."""

from __future__ import annotations

import subprocess
from typing import Any


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    """Waits until a process that was asked to end has ended; kills it after so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""An engine's process that hangs before it has opened its model."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.pause()

"""An engine's process that never has its model open."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.pause()

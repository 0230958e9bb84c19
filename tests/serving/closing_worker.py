"""An engine's process that closes its pipe, says so by a file, and stays."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

CLOSED = "QUIRE_TEST_CLOSED"
"""The variable that names the file."""

if __name__ == "__main__":
    os.close(int(sys.argv[1]))
    Path(os.environ[CLOSED]).touch()
    signal.pause()

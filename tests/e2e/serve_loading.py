"""`quire serve` whose model is being opened without end: `ARGUMENTS...`."""

from __future__ import annotations

import sys

from quire.api import server
from quire.cli import main

if __name__ == "__main__":
    opened = server._open
    server._open = lambda worker, *rest, **named: opened("tests.e2e.endless_worker", *rest, **named)
    sys.exit(main(sys.argv[1:]))

"""`quire serve` that goes on answering for minutes once its engine is gone: `ARGUMENTS...`."""

from __future__ import annotations

import sys

from quire.api import server
from quire.cli import main
from tests.support.waiting import HANG_S

if __name__ == "__main__":
    server._LAST_WORD_S = HANG_S
    sys.exit(main(sys.argv[1:]))

"""`quire serve` for a folder of the scripted family: `FOLDER DIALECT`."""

from __future__ import annotations

import sys

from quire.api.server import serve
from quire.core.config import EngineConfig, ModelConfig, ServerConfig

NAME = "scripted"
WORKER = "tests.support.scripted_worker"

if __name__ == "__main__":
    folder, dialect = sys.argv[1:]
    config = ServerConfig(
        port=0,
        served_name=NAME,
        dialect=dialect,
        allow_special_tokens=True,  # by which a test names its script
        log_level="warning",
    )
    sys.exit(serve((ModelConfig(EngineConfig(folder), config),), config, WORKER))

"""The engine's process with the scripted family in its registry."""

from __future__ import annotations

import sys

from quire.engine.worker import main
from quire.models.families.common import Family
from quire.models.registry import FAMILIES
from tests.support.scripted_model import MODEL_TYPE, Scripted

if __name__ == "__main__":
    FAMILIES[MODEL_TYPE] = Family(
        MODEL_TYPE, "scripted", lambda settings: Scripted.from_config(settings.values)
    )
    sys.exit(main())

"""TeleChat 3."""

from __future__ import annotations

from quire.models.families.common import Family
from quire.models.families.meta import llama

FAMILIES = (Family("telechat3", "TeleChat 3", llama),)

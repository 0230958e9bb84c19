"""Settings of tests of attention."""

from __future__ import annotations

from tests.support.new_memory import new_memory as new_memory

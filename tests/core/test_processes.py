"""Resource limits of processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMITED = """
import resource
from quire.core.processes import allow_many_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_many_descriptors()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "then"), [(100, 300, (300, 300)), (300, 300, (300, 300))])
def test_as_many_files_as_the_system_allows(soft: int, hard: int, then: tuple[int, int]) -> None:
    code = LIMITED.format(soft=soft, hard=hard)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(then)

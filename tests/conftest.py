"""Fixtures and settings of all tests."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.child import Child, quire_serve
from tests.support.everyday import leave_out_slow
from tests.support.skips import summary

# A busy machine is no failure: an example may take as long as it likes.
settings.register_profile("quire", deadline=None)
settings.load_profile("quire")

# A shell starts background jobs with SIGINT ignored, and servers that tests start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests check kernels themselves, whatever passed in other processes.
_COMPILED = "MLX_PTX_CACHE_DIR"
os.environ.pop(_COMPILED, None)

_QUICK = (
    *("tests/core", "tests/scheduler"),
    *("tests/test_imports.py", "tests/test_limits.py", "tests/test_skips.py"),
)
"""Folders and files of tests that need neither MLX nor a server."""


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Make no items of slow tests where whole files are run without them.

    Whoever names a test is told that it was deselected.
    """
    config = collector.config
    if "not slow" not in config.option.markexpr or any("::" in each for each in config.args):
        return None
    if not name.startswith("test") or not inspect.isfunction(obj):
        return None
    slow = collector.get_closest_marker("slow") is not None or leave_out_slow(obj)
    return [] if slow else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `_QUICK`."""
    for item in items:
        if item.nodeid.startswith(_QUICK):
            item.add_marker(pytest.mark.quick)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and for want of what."""
    lines = list(summary(terminalreporter.stats.get("skipped", ())))
    chosen = terminalreporter.config.getoption("markexpr")
    if deselected := len(terminalreporter.stats.get("deselected", ())):
        lines.append(f"{deselected} not chosen by -m {chosen!r}")
    if lines:
        terminalreporter.section("left out")
        for line in lines:
            terminalreporter.line(line)


def pytest_collection_finish() -> None:
    """Freeze what the modules have made, so that no garbage collection looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def no_kernel_folder() -> Iterator[None]:
    """Leave no folder of compiled kernels to the next file.

    An engine's worker or a command in this process chooses one. It records which kernels passed
    their checks, so that a later test would not check its own.
    """
    before = os.environ.get("TMPDIR")
    yield
    if os.environ.pop(_COMPILED, None) is None:
        return
    if before is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = before
    if (verified := sys.modules.get("quire.device.verified")) is not None:
        verified.verified_kernels.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def own_products() -> Iterator[None]:
    """Start each file with MLX's own products: an engine that a test opens may choose others."""
    yield
    if (device := sys.modules.get("quire.device.device")) is not None:
        device.current_device().choose_products("mlx")


@pytest.fixture(scope="session")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Yield one real server with the embedded model for all tests that need no settings of their
    own.

    For the session, as its start takes longer than most tests, and tests of one folder need not
    follow each other.
    """
    with quire_serve(tmp_path_factory.mktemp("serve")) as child:
        yield child
        assert child.process.poll() is None, f"the server died: {child.log.read_text()}"
    assert child.log.read_text().endswith("quire: stopping\n")

"""docs/design.md, "Rooms": imports go one way, and what must be light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "quire"

HTTP_SIDE = {"serving", "media", "text", "constraints"}
ENGINE_SIDE = {
    *(
        "engine",
        "executor",
        "program",
        "scheduler",
        "speculation",
        "models",
        "sampling",
        "attention",
        "cache",
        "device",
        "constraints",
    ),
}
LAYERS: dict[str, set[str]] = {
    # package: the packages that it may import, beside itself and the core
    "cli": {"api", "demo", "llm", "scale"} | HTTP_SIDE | ENGINE_SIDE,
    "scale": {"api", "demo", "llm", "serving"},
    "llm": {"api", "demo", "serving", "media", "text"},
    "api": {"serving", "media", "text"},
    "serving": {"media", "text", "constraints"},
    "media": set(),
    "text": set(),
    "engine": ENGINE_SIDE - {"engine"},
    "scheduler": {"sampling", "cache", "constraints"},
    "speculation": {"scheduler", "cache", "models"},
    "sampling": {"constraints", "device"},
    "models": {"cache", "device"},
    "executor": {
        "constraints",
        "program",
        "models",
        "attention",
        "cache",
        "device",
        "scheduler",
        "sampling",
    },
    "program": {"models", "cache", "device"},
    "attention": {"cache", "device"},
    "cache": {"device"},
    "constraints": set(),
    "device": set(),
    "demo": set(),
}
NO_MLX = [
    "quire.scheduler.scheduler",
    "quire.cache.block_manager",
    "quire.cache.index",
    "quire.cache.specs",
    "quire.core.kv_format",
    "quire.api.app",
    "quire.serving.engine_client",
    "quire.serving.service",
    "quire.serving.assembly",
    "quire.constraints.grammar",
]


@cache
def modules(path: Path) -> set[str]:
    """Return modules of Quire that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("quire.") and name != "quire.__version__"}


def imported(path: Path) -> set[str]:
    """Return packages of Quire that a file imports, anywhere in it."""
    return {name.split(".")[1] for name in modules(path)}


def test_every_package_has_its_layer() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert packages == set(LAYERS) | {"core"}


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_one_way(package: str) -> None:
    allowed = LAYERS[package] | {"core", package}
    for path in sorted((SOURCE / package).rglob("*.py")):
        extra = imported(path) - allowed
        assert not extra, f"{path.relative_to(SOURCE)} imports {', '.join(sorted(extra))}"


def test_protocols_share_through_the_shared_package_alone() -> None:
    protocols = {path.parent.name for path in (SOURCE / "api").glob("*/endpoint.py")}
    assert {"chat", "completions", "messages", "responses"} <= protocols
    for path in sorted((SOURCE / "api").glob("*/*.py")):
        others = protocols - {path.parent.name}
        api = [module for module in modules(path) if module.startswith("quire.api.")]
        names = {module.split(".")[2] for module in api}
        assert not names & others, f"{path.relative_to(SOURCE)} imports {names & others}"


def test_the_core_imports_no_other_package() -> None:
    for path in sorted((SOURCE / "core").rglob("*.py")):
        assert imported(path) <= {"core"}, path


def test_the_two_processes_meet_in_the_core_alone() -> None:
    """Packages that both may import besides the core, such as grammars, import neither."""
    shared = HTTP_SIDE & ENGINE_SIDE
    for package in (HTTP_SIDE | {"api"}) - shared:
        assert LAYERS[package] <= HTTP_SIDE
    for package in ENGINE_SIDE - shared:
        assert LAYERS[package] <= ENGINE_SIDE
    for package in shared:
        assert not LAYERS[package]


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for types count, too."""
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if path.stem != "__init__"]
    imports = {
        ".".join(("quire", *path.relative_to(SOURCE).with_suffix("").parts)): modules(path)
        for path in paths
    }
    while free := [name for name, used in imports.items() if not used & imports.keys() - {name}]:
        for name in free:
            del imports[name]
    assert not imports


def test_these_run_without_mlx() -> None:
    code = f"import sys; sys.modules['mlx'] = None; import {', '.join(NO_MLX)}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_http_side_may_fork_once_it_is_imported() -> None:
    """Libraries of media would start threads, and jobs alone decode (`serving/job_starts.py`)."""
    code = (
        "import sys, psutil, quire.api.server; "
        "print(psutil.Process().num_threads(), sys.modules.keys() & {'numpy', 'PIL', 'mlx'})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "1 set()\n", result.stderr


def test_import_loads_next_to_nothing() -> None:
    code = "import sys; before = set(sys.modules); import quire; print(*set(sys.modules) - before)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert loaded <= {"quire"} | sys.stdlib_module_names
    assert len(result.stdout.split()) < 50


def test_no_import_asks_for_the_device() -> None:
    """Whoever starts a process may still say what MLX runs on."""
    code = "import quire.device.device as d; d.current_device = None; import quire.engine.engine"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

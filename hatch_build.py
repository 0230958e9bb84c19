"""Hatchling's hook: compile the extensions on Linux, where a C++ compiler is installed.

The package works without them. The build names what is missing (`pip install -v` shows it), and
`quire doctor` says whether the kernels are there and for which instruction sets. The CPU kernels
are compiled for this processor alone, unless the variable `QUIRE_BUILD_KERNELS` says otherwise:
`asked` in `quire.device.cpu.build` lists its values.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_CPU = "quire.device.cpu.build"
_BUILDS = (_CPU, "quire.device.cuda.build")


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own parameter
    """Adds the compiled extension to a wheel, or to the tree of an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        if self.target_name != "wheel":
            return
        # They import nothing of Quire but each other.
        sys.path.insert(0, str(Path(self.root, "src")))
        cpu = importlib.import_module(_CPU)
        choice = cpu.asked()
        if choice == cpu.OFF:
            return
        with TemporaryDirectory() as shared:
            for name in _BUILDS:
                module = importlib.import_module(name)
                try:
                    target: Path = module.build(shared=Path(shared))
                except module.CannotBuild as error:
                    self.app.display_warning(f"without {name.removesuffix('.build')}: {error}")
                    continue
                if module is cpu and not choice:
                    sets = ", ".join(cpu.sets_of_this_processor())
                    self.app.display_info(f"CPU kernels for this processor alone: {sets}")
                build_data["pure_python"] = False
                build_data["infer_tag"] = True
                build_data["artifacts"].append(str(target.relative_to(self.root)))

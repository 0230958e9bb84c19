"""Hatchling's hook: compiles the CPU kernels where that can be; without them the package is whole.

A compiler, MLX's headers and nanobind are needed, on Linux. What is missing is said, and
`quire doctor` says later whether the kernels are there.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own parameter
    """Adds the compiled extension to a wheel, or to the tree of an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        if self.target_name != "wheel" or os.environ.get("QUIRE_KERNELS") == "off":
            return
        path = Path(self.root, "src/quire/device/cpu/build.py")
        spec = importlib.util.spec_from_file_location("quire_kernels_build", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            target: Path = module.build()
        except module.CannotBuild as error:
            self.app.display_warning(f"without the CPU kernels: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(str(target.relative_to(self.root)))

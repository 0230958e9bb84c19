"""The models that comparisons know by name."""

from __future__ import annotations

from pathlib import Path

import make_demo_model
import make_tiny_model


def model_folder(name: str, scratch: Path) -> Path:
    """Return the folder of a model, written to `scratch` where it is `tiny` or `demo`."""
    if name not in ("tiny", "demo"):
        return Path(name).resolve()
    folder = scratch.resolve() / name
    if name == "tiny":
        make_tiny_model.write_model(folder)
    else:
        make_demo_model.write_model(folder)
    return folder

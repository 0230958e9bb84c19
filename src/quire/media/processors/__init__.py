"""Image processors: from a picture's bytes to what a vision encoder takes, and the registry."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from quire.core.folder import read_object
from quire.media.processors.base import ImageProcessor, Settings
from quire.media.processors.gemma4 import Gemma4ImageProcessor

__all__ = ["PROCESSORS", "ImageProcessor", "open_processor"]

log = logging.getLogger("quire.media")

# By the `image_processor_type` of a model folder; takes the processor's settings and the model's.
PROCESSORS: dict[str, Callable[[Settings, Settings], ImageProcessor]] = {
    "Gemma4ImageProcessor": Gemma4ImageProcessor.open,
    "Gemma4ImageProcessorFast": Gemma4ImageProcessor.open,
    "Gemma4ImageProcessorPil": Gemma4ImageProcessor.open,
}


def open_processor(folder: Path) -> ImageProcessor | None:
    """The image processor of a model folder; None if the model is served without pictures.

    That is a model without a vision encoder, without a processor's settings, or with a processor
    that is not known here, which is logged.

    Raises:
        ModelError: a file cannot be understood, or holds a value that is not supported.
    """
    config = Settings(folder / "config.json", "", read_object(folder / "config.json"))
    settings = _find_settings(folder)
    if config.values.get("vision_config") is None or settings is None:
        return None
    kind = settings.values.get("image_processor_type")
    build = PROCESSORS.get(kind) if isinstance(kind, str) else None
    if build is None:
        log.warning("%s: no support for %r; serving text only", settings.path, kind)
        return None
    return build(settings, config)


def _find_settings(folder: Path) -> Settings | None:
    """The new file's object, else the whole of the old file; None where there is neither."""
    path = folder / "processor_config.json"
    whole = Settings(path, "", read_object(path))
    values = whole.values.get("image_processor")
    if isinstance(values, dict):
        return Settings(path, "image_processor.", values)
    if values is not None:
        raise whole.error("image_processor", "not an object")
    path = folder / "preprocessor_config.json"
    values = read_object(path)
    return Settings(path, "", values) if values else None

"""Processors by kind: from a file's bytes to what an encoder takes, and the registry of kinds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from quire.core.folder import read_object
from quire.media.processors.base import ImageProcessor, MediaProcessor, Settings
from quire.media.processors.gemma4 import Gemma4ImageProcessor
from quire.media.processors.qwen import QwenImageProcessor

__all__ = ["IMAGE_PROCESSORS", "KINDS", "MediaProcessor", "open_processors"]

log = logging.getLogger("quire.media")

# By the `image_processor_type` of a model folder; takes the processor's settings and the model's.
IMAGE_PROCESSORS: dict[str, Callable[[Settings, Settings], ImageProcessor]] = {
    "Gemma4ImageProcessor": Gemma4ImageProcessor.open,
    "Gemma4ImageProcessorFast": Gemma4ImageProcessor.open,
    "Gemma4ImageProcessorPil": Gemma4ImageProcessor.open,
    "Qwen2VLImageProcessor": QwenImageProcessor.open,
    "Qwen2VLImageProcessorFast": QwenImageProcessor.open,
    "Qwen2VLImageProcessorPil": QwenImageProcessor.open,
    "Qwen2_5_VLImageProcessor": QwenImageProcessor.open,
}


def open_image_processor(folder: Path) -> ImageProcessor | None:
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
    build = IMAGE_PROCESSORS.get(kind) if isinstance(kind, str) else None
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


KINDS: dict[str, Callable[[Path], MediaProcessor | None]] = {"image": open_image_processor}
"""How the processor of each kind is opened; None where the model folder has none of it."""


def open_processors(folder: Path, kinds: Iterable[str]) -> dict[str, MediaProcessor]:
    """The processors of a model folder, of these kinds as far as they are known.

    Raises:
        ModelError: a file cannot be understood, or holds a value that is not supported.
    """
    opened = {kind: KINDS[kind](folder) for kind in kinds if kind in KINDS}
    return {kind: processor for kind, processor in opened.items() if processor is not None}

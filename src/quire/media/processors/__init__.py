"""Processors by kind: from a file's bytes to what an encoder takes, and the registry of kinds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.core.folder import read_object
from quire.media.processors.base import MediaProcessor, Settings
from quire.media.processors.gemma4 import Gemma4ImageProcessor, Gemma4VideoProcessor
from quire.media.processors.gemma4_audio import Gemma4AudioProcessor
from quire.media.processors.qwen import GlmImageProcessor, QwenImageProcessor
from quire.media.processors.qwen_audio import QwenAudioProcessor
from quire.media.processors.qwen_video import Qwen3VideoProcessor, QwenVideoProcessor
from quire.media.processors.tiles import Gemma3ImageProcessor

__all__ = ["KINDS", "Kind", "MediaProcessor", "open_processors"]

log = logging.getLogger("quire.media")

Open = Callable[[Settings, Settings], MediaProcessor]
"""Takes a processor's settings and the model's."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a model folder describes how one kind of media is read, and who can read it.

    Attributes:
        part: of `config.json`, the encoder's; a model without it does not take the kind.
        section: of `processor_config.json`.
        old_file: holds the section's values where that file has none.
        type_key: of the section; names the processor.
        processors: by that name.
        beside_pictures: by the name of the processor of pictures, for folders that say nothing of
            this kind; takes that one's settings.
    """

    part: str
    section: str
    old_file: str
    type_key: str
    processors: Mapping[str, Open]
    beside_pictures: Mapping[str, Open] = field(default_factory=dict)

    def open(self, folder: Path) -> MediaProcessor | None:
        """The processor of a model folder; None if the model is served without this kind.

        That is a model without the encoder, without a processor's settings, or with a processor
        that is not known here, which is logged.

        Raises:
            ModelError: a file cannot be understood, or holds a value that is not supported.
        """
        config = _config(folder)
        settings = self._find_settings(folder)
        if config.values.get(self.part) is None:
            return None
        if settings is None:
            return self._open_beside_pictures(folder, config)
        name = settings.values.get(self.type_key)
        build = self.processors.get(name) if isinstance(name, str) else None
        if build is None:
            log.warning("%s: no support for %r; serving without it", settings.path, name)
            return None
        return build(settings, config)

    def _open_beside_pictures(self, folder: Path, config: Settings) -> MediaProcessor | None:
        pictures = KINDS["image"]
        settings = pictures._find_settings(folder)
        name = None if settings is None else settings.values.get(pictures.type_key)
        build = self.beside_pictures.get(name) if isinstance(name, str) else None
        return None if settings is None or build is None else build(settings, config)

    def _find_settings(self, folder: Path) -> Settings | None:
        """The new file's object, else the whole of the old file; None where there is neither."""
        path = folder / "processor_config.json"
        whole = Settings(path, "", read_object(path))
        values = whole.values.get(self.section)
        if isinstance(values, dict):
            return Settings(path, f"{self.section}.", values)
        if values is not None:
            raise whole.error(self.section, "not an object")
        path = folder / self.old_file
        values = read_object(path)
        return Settings(path, "", values) if values else None


KINDS: dict[str, Kind] = {
    "image": Kind(
        "vision_config",
        "image_processor",
        "preprocessor_config.json",
        "image_processor_type",
        {
            "Gemma3ImageProcessor": Gemma3ImageProcessor.open,
            "Gemma3ImageProcessorFast": Gemma3ImageProcessor.open,
            "Gemma4ImageProcessor": Gemma4ImageProcessor.open,
            "Gemma4ImageProcessorFast": Gemma4ImageProcessor.open,
            "Gemma4ImageProcessorPil": Gemma4ImageProcessor.open,
            "Qwen2VLImageProcessor": QwenImageProcessor.open,
            "Qwen2VLImageProcessorFast": QwenImageProcessor.open,
            "Qwen2VLImageProcessorPil": QwenImageProcessor.open,
            "Qwen2_5_VLImageProcessor": QwenImageProcessor.open,
            "Glm4vImageProcessor": GlmImageProcessor.open,
            "Glm4vImageProcessorFast": GlmImageProcessor.open,
            "Glm46VImageProcessor": GlmImageProcessor.open,
            "Glm46VImageProcessorFast": GlmImageProcessor.open,
        },
    ),
    "audio": Kind(
        "audio_config",
        "feature_extractor",
        "preprocessor_config.json",
        "feature_extractor_type",
        {
            "Gemma4AudioFeatureExtractor": Gemma4AudioProcessor.open,
            "WhisperFeatureExtractor": QwenAudioProcessor.open,
        },
    ),
    "video": Kind(
        "vision_config",
        "video_processor",
        "video_preprocessor_config.json",
        "video_processor_type",
        {
            "Gemma4VideoProcessor": Gemma4VideoProcessor.open,
            "Qwen2VLVideoProcessor": QwenVideoProcessor.open,
            "Qwen3VLVideoProcessor": Qwen3VideoProcessor.open,
        },
        # Qwen2-VL and Qwen2.5-VL were published without settings for videos.
        {
            "Qwen2VLImageProcessor": QwenVideoProcessor.open_beside_pictures,
            "Qwen2_5_VLImageProcessor": QwenVideoProcessor.open_beside_pictures,
        },
    ),
}
"""The kinds of media that are known."""


def _config(folder: Path) -> Settings:
    """The model's keys; those of the part that reads, in one that also speaks (Qwen3-Omni)."""
    path = folder / "config.json"
    values = read_object(path)
    thinker = values.get("thinker_config")
    if isinstance(thinker, dict):
        return Settings(path, "thinker_config.", thinker)
    return Settings(path, "", values)


def open_processors(folder: Path, kinds: Iterable[str]) -> dict[str, MediaProcessor]:
    """The processors of a model folder, of these kinds as far as they are known.

    Raises:
        ModelError: a file cannot be understood, or holds a value that is not supported.
    """
    opened = {kind: KINDS[kind].open(folder) for kind in kinds if kind in KINDS}
    return {kind: processor for kind, processor in opened.items() if processor is not None}

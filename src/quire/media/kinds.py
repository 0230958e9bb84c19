"""The registry of media kinds: how clients send them, limits, and processors.

Protocols, flags, limits and error texts are derived from it. It imports no decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from quire.core.folder import read_object
from quire.core.original_configs import read_config
from quire.core.values import Values
from quire.media.source import DOCUMENT, FileLimits, MediaLimits

if TYPE_CHECKING:
    from quire.media.processors.base import MediaProcessor

Open = Callable[[Values, Values], "MediaProcessor"]
"""Opens a processor from the processor's settings and the model's configuration."""

Protocols = Literal["url_part", "block"]
"""The field of `MediaInput` that holds the type of a content part: OpenAI's, or Anthropic's."""

Option = Literal["detail", "max_soft_tokens", "use_audio_in_video"]
"""A request field that says how a file is read."""

log = logging.getLogger("quire.media")

_BYTES_A_PIXEL = 20  # of an image being decoded: stored, with transparency, on white, turned
_BYTES_A_SECOND = 192_000 * 4 * 4  # of sound at the highest rate: in pieces, joined, padded
_BYTES_A_PIXEL_DECODED = 60  # of a video's frames: reference frames, and the current one


@dataclass(frozen=True, slots=True)
class MediaInput:
    """How clients send one kind of media, and the texts about it.

    Attributes:
        name: the kind's name in flags, such as `--max-images`.
        noun, plural: the kind's name in messages: "sound", "sounds".
        left_out: text that replaces an item in the history if the model does not take this kind.
        limits: default limits.
        bounds: help texts of this kind's further limits, beside `files` and `bytes`, by limit.
        working_bytes: the most memory in bytes that reading one file takes.
        url_part: type of OpenAI's part, `{"type": url_part, url_part: {"url": URL}}`; "" if there
            is none.
        block: type of Anthropic's block, `{"type": block, "source": SOURCE}`; "" if there is none.
        media_types: pattern of the media types that a base64 source may name.
        options: fields accepted beside the URL of OpenAI's part; Anthropic's block takes all but
            `detail`.
    """

    name: str
    noun: str
    plural: str
    left_out: str
    limits: MediaLimits
    bounds: Mapping[str, str]
    working_bytes: Callable[[FileLimits], int] = lambda limits: limits.bytes
    url_part: str = ""
    block: str = ""
    media_types: str = ""
    options: tuple[Option, ...] = ()

    def limits_with(self, given: Mapping[str, float]) -> MediaLimits:
        """Return the limits, with the operator's values in place of the defaults."""
        each: dict[str, Any] = {name: value for name, value in given.items() if name != "files"}
        files = int(given.get("files", self.limits.files))
        return MediaLimits(files, replace(self.limits.each, **each))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of media that encoders take: how clients send it, and where a model folder describes
    it.

    Attributes:
        input: how clients send it.
        part: the encoder's part of `config.json`; a model without it does not take the kind.
        section: the section of `processor_config.json`.
        old_file: the file that holds the section's values in older folders.
        type_key: the key of the section that names the processor.
        older_type_key: the key used if `type_key` is absent. There an image processor's name stands
            for the video processor of the same model.
        table: `module:name` of the functions that open processors, by the processor's name.
        table_beside_pictures: like `table`, by the image processor's name, for folders that do not
            describe this kind. These functions get the image processor's settings.
        table_by_model: like `table`, by `model_type`, for models that only `config.json` describes.
    """

    input: MediaInput
    part: str
    section: str
    old_file: str
    type_key: str
    table: str
    table_beside_pictures: str = ""
    older_type_key: str = ""
    table_by_model: str = ""

    @property
    def processors(self) -> Mapping[str, Open]:
        """Functions that open processors, by the processor's name."""
        return _table(self.table)

    def open(self, folder: Path) -> MediaProcessor | None:
        """Open the processor of a model folder. Return None if the model is served without this
        kind.

        This holds for a model without the encoder, without settings of a processor, or with an
        unknown processor, which is logged.

        Raises:
            ModelError: a file cannot be read, or holds a value that is not supported.
        """
        config = _config(folder)
        settings = self._find_settings(folder)
        if (own := self._by_model(config)) is not None:
            return own(settings or config, config)
        if not config.has(self.part):
            return None
        if settings is None:
            return self._open_beside_pictures(folder, config)
        older = str(settings.value(self.older_type_key) or "")
        name = settings.value(self.type_key)
        name = name or older.replace("ImageProcessor", "VideoProcessor") or None
        found = name or config.value("model_type")
        build = self.processors.get(found) if isinstance(found, str) else None
        if build is None:
            log.warning("%s: no support for %r; serving without it", settings.file, name)
            return None
        return build(settings, config)

    def _by_model(self, config: Values) -> Open | None:
        name = config.value("model_type")
        known = _table(self.table_by_model) if self.table_by_model else {}
        return known.get(name) if isinstance(name, str) else None

    def _open_beside_pictures(self, folder: Path, config: Values) -> MediaProcessor | None:
        pictures = KINDS["image"]
        settings = pictures._find_settings(folder)
        if settings is None or not self.table_beside_pictures:
            return None
        name = settings.value(pictures.type_key)
        known = _table(self.table_beside_pictures)
        build = known.get(name) if isinstance(name, str) else None
        return None if build is None else build(settings, config)

    def _find_settings(self, folder: Path) -> Values | None:
        """Return the section of the new file, else the whole old file; None if there is neither."""
        path = folder / "processor_config.json"
        whole = Values(read_object(path), file=path)
        if whole.has(self.section):
            return whole.nested(self.section, needed=False)
        path = folder / self.old_file
        values = read_object(path)
        return Values(values, file=path) if values else None


def _config(folder: Path) -> Values:
    """Return the model's configuration; for Qwen3-Omni, the thinker's part of it."""
    path = folder / "config.json"
    config = Values(read_config(folder), file=path)
    return config.within("thinker_config")


def _table(where: str) -> Mapping[str, Open]:
    found: Mapping[str, Open] = resolve_name(where)
    return found


_TABLES = "quire.media.processors"

KINDS: dict[str, Kind] = {
    "image": Kind(
        MediaInput(
            name="image",
            noun="image",
            plural="images",
            left_out="[An image stood here. The model that answers now sees none.]",
            limits=MediaLimits(64, FileLimits(20 << 20, pixels=50_000_000)),
            bounds={"pixels": "maximum width times height of one image"},
            working_bytes=lambda limits: _BYTES_A_PIXEL * limits.pixels,
            url_part="image_url",
            block="image",
            media_types=r"^image/(jpeg|png|gif|webp)$",
            options=("detail", "max_soft_tokens"),
        ),
        part="vision_config",
        section="image_processor",
        old_file="preprocessor_config.json",
        type_key="image_processor_type",
        table=f"{_TABLES}:IMAGES",
        table_by_model=f"{_TABLES}:IMAGES_BY_MODEL",
    ),
    "audio": Kind(
        MediaInput(
            name="audio",
            noun="sound",
            plural="sounds",
            left_out="[A sound stood here. The model that answers now hears none.]",
            limits=MediaLimits(16, FileLimits(20 << 20, seconds=600.0)),
            bounds={"seconds": "maximum length of one sound; models may hear less"},
            working_bytes=lambda limits: limits.bytes + round(_BYTES_A_SECOND * limits.seconds),
            url_part="audio_url",
            block="audio",
            media_types=r"^audio/",
        ),
        part="audio_config",
        section="feature_extractor",
        old_file="preprocessor_config.json",
        type_key="feature_extractor_type",
        table=f"{_TABLES}:SOUNDS",
        table_by_model=f"{_TABLES}:SOUNDS_BY_MODEL",
    ),
    "video": Kind(
        MediaInput(
            name="video",
            noun="video",
            plural="videos",
            left_out="[A video stood here. The model that answers now watches none.]",
            limits=MediaLimits(4, FileLimits(100 << 20, pixels=10_000_000, seconds=600.0)),
            bounds={
                "pixels": "maximum width times height of one video's frames",
                "seconds": "maximum length of one video",
                "frames": "maximum frames of one video that the model is shown",
            },
            working_bytes=lambda limits: (
                limits.bytes
                + _BYTES_A_PIXEL_DECODED * limits.pixels
                + round(_BYTES_A_SECOND * limits.seconds)
            ),
            url_part="video_url",
            block="video",
            media_types=r"^video/",
            options=("max_soft_tokens", "use_audio_in_video"),
        ),
        part="vision_config",
        section="video_processor",
        old_file="video_preprocessor_config.json",
        type_key="video_processor_type",
        older_type_key="image_processor_type",
        table=f"{_TABLES}:VIDEOS",
        table_beside_pictures=f"{_TABLES}:VIDEOS_BESIDE_PICTURES",
    ),
}
"""The kinds of media that encoders take."""

_DOCUMENT = MediaInput(
    name="document",
    noun="document",
    plural="documents",
    left_out="[A file stood here. The model that answers now reads none.]",
    limits=MediaLimits(8, FileLimits(32 << 20, pages=100)),
    bounds={"pages": "maximum pages of one document"},
)


def inputs() -> dict[str, MediaInput]:
    """Return how clients send each kind of media. Documents are included, though no encoder takes
    them.
    """
    return {kind: each.input for kind, each in KINDS.items()} | {DOCUMENT: _DOCUMENT}


def kinds_by(protocols: Protocols) -> dict[str, str]:
    """Return the media kinds by the type of their content part in these protocols."""
    named = {getattr(each, protocols): kind for kind, each in inputs().items()}
    return {name: kind for name, kind in named.items() if name}


def limits_of(given: Mapping[str, Mapping[str, float]]) -> dict[str, MediaLimits]:
    """Return the limits of all kinds, with the operator's values in place of the defaults."""
    return {kind: each.limits_with(given.get(kind, {})) for kind, each in inputs().items()}


def open_processors(folder: Path, kinds: Iterable[str]) -> dict[str, MediaProcessor]:
    """Open the processors of a model folder for these kinds. Kinds that the model does not take are
    left out.

    Raises:
        ModelError: a file cannot be read, or holds a value that is not supported.
    """
    opened = {kind: KINDS[kind].open(folder) for kind in kinds if kind in KINDS}
    return {kind: processor for kind, processor in opened.items() if processor is not None}

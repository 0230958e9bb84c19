"""Decoders with encoders of pictures, videos and sound, and positions of three axes (M-RoPE)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.core.media import MediaItem, PlacedMedia, sound_rows
from quire.models.audio.qwen import AudioTower, QwenSoundEncoder, channels_last
from quire.models.audio.qwen_video import HEARD, QwenVideoAudioEncoder
from quire.models.base import MediaEncoder
from quire.models.decoder import DecoderModel
from quire.models.description import Description
from quire.models.vision.qwen import QwenVision, VisionTower
from quire.models.weights.names import Names, Weights

log = logging.getLogger("quire.models")

VISUAL = {
    "visual.": "",
    "vision_tower.": "",
    "vit.": "",  # HunyuanOCR's
    # PaddleOCR-VL's
    "visual.vision_model.": "",
    "visual.projector.": "merger.",
    "projector.": "merger.",
    "mlp_AR.": "merger.",
    # ERNIE 4.5 VL's
    "vision_model.": "",
    "resampler_model.": "resampler.",
    # Youtu-VL's
    "siglip2.vision_model.": "",
    "siglip2.": "",
    "merger.": "merger.",
    # Phi-4's
    "vision_tower.vision_tower.vision_model.": "",
    "mm_projector.": "merger.",
    # MiniCPM-V's, as converted
    "vit_merger.": "vit_merger.",
    # LFM2-VL's
    "vision_tower.vision_model.": "",
    "multi_modal_projector.": "merger.",
}
"""Prefixes of the encoder's tensors in checkpoints, with their names here."""
SEEN = ("image", "video")
"""Media kinds whose rows have places in a picture."""
_HEARD = {"audio_tower.": ""}
_SPOKEN = ("talker.", "code2wav.")
"""Prefixes of tensors that generate speech."""


def three_axes(
    length: int, media: Sequence[PlacedMedia], kind: QwenVision
) -> npt.NDArray[np.float32]:
    """Return a prompt's positions, `[3, length]` (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Positions of text are equal on all axes. An item's positions continue those of the text before
    it, by time, row and column of each of its squares. Text after an item continues from the
    largest position of its last row. Sound counts like text, also within a video.
    """
    parts = []
    done, position = 0, 0.0
    for placed in (each for each in media if each.item.kind in SEEN):
        text = position + np.arange(placed.start - done)
        parts.append(np.broadcast_to(text, (3, len(text))))
        position += len(text)
        squares = _squares(placed.item, kind)
        parts.append(position + squares)
        position = float(parts[-1][:, -1].max()) + 1
        done = placed.end
    text = position + np.arange(length - done)
    parts.append(np.broadcast_to(text, (3, len(text))))
    return np.concatenate(parts, axis=1).astype(np.float32)


def _squares(item: MediaItem, kind: QwenVision) -> npt.NDArray[np.float64]:
    """Return time, row and column of each row of a picture or video, `[3, rows]`."""
    moments, rows, columns, step = (1, *item.shape, 0) if item.kind == "image" else item.shape[:4]
    grid = moments, rows // kind.merge, columns // kind.merge
    squares = np.indices(grid).reshape(3, -1).astype(np.float64)
    if kind.times:  # absolute time (Qwen2.5-VL, arXiv:2502.13923, section 2.1.3)
        times = squares[0] * (step * kind.times) / 1_000_000
        squares[0] = times if kind.between else np.floor(times)
    if len(item.shape) == HEARD:
        sounds = item.tokens - squares.shape[1]
        heard = np.array(
            sound_rows(moments, grid[1] * grid[2], step, rate=kind.times, sounds=sounds)
        )
        found = np.empty((3, item.tokens))
        found[:, heard], found[:, ~heard] = np.arange(sounds), squares
        return found
    return squares


class VisionLanguageModel(DecoderModel):
    """A decoder with a vision encoder.

    Args:
        visual: the encoder; a checkpoint without its tensors is served as a model of text only.
        visual_names: converts the encoder's tensors, without prefix, to this package's names and
            layouts.
    """

    def __init__(
        self,
        description: Description,
        names: Names,
        visual: VisionTower,
        visual_names: Callable[[Weights], Weights],
    ) -> None:
        super().__init__(description, names)
        self.visual: VisionTower | None = visual
        self._visual_names = visual_names

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        return {} if self.visual is None else self.visual.encoders

    @property
    def position_axes(self) -> int:
        return 3

    def positions(
        self, tokens: Sequence[int], media: Sequence[PlacedMedia]
    ) -> npt.NDArray[np.float32] | None:
        if self.visual is None or not any(each.item.kind in SEEN for each in media):
            return None
        return three_axes(len(tokens), media, self.visual.kind)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        text, visual = _apart(weights, VISUAL)
        if not visual:
            # Text-only conversions keep the configuration of the encoder, without its tensors.
            self.visual = None
        translated = self._visual_names(visual)
        return super().sanitize(text) | {f"visual.{n}": array for n, array in translated.items()}


class TextPositionsModel(VisionLanguageModel):
    """A vision-language model whose picture rows are numbered like text tokens."""

    @property
    def position_axes(self) -> int:
        return 0

    def positions(
        self, tokens: Sequence[int], media: Sequence[PlacedMedia]
    ) -> npt.NDArray[np.float32] | None:
        return None


class AudioVisionLanguageModel(VisionLanguageModel):
    """A decoder with vision and audio encoders, perhaps the thinker of a model that also speaks.

    Args:
        audio_tower: the encoder of sound; a checkpoint without its tensors is served without sound.
    """

    def __init__(
        self,
        description: Description,
        names: Names,
        visual: VisionTower,
        visual_names: Callable[[Weights], Weights],
        audio_tower: AudioTower,
    ) -> None:
        super().__init__(description, names, visual, visual_names=visual_names)
        self.audio_tower: AudioTower | None = audio_tower

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        if self.audio_tower is None:
            return super().encoders
        sounds = QwenSoundEncoder(self.audio_tower)
        if self.visual is None:
            return {"audio": sounds}
        videos = QwenVideoAudioEncoder(self.visual, sounds)
        return {**super().encoders, "video": videos, "audio": sounds}

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        others, heard = _apart(_thinking(weights), _HEARD)
        if not heard:
            self.audio_tower = None
        translated = channels_last(heard)
        return super().sanitize(others) | {f"audio_tower.{n}": a for n, a in translated.items()}


def _thinking(weights: Weights) -> Weights:
    """Drop the tensors that generate speech, and remove the others' prefix."""
    kept = {name: array for name, array in weights.items() if not name.startswith(_SPOKEN)}
    if len(kept) < len(weights):
        log.info("Speech output is not supported: the model answers in text")
    return {name.removeprefix("thinker."): array for name, array in kept.items()}


def _apart(weights: Weights, prefixes: Mapping[str, str]) -> tuple[Weights, Weights]:
    """Return the decoder's tensors, and the encoder's without their prefixes."""
    text, encoder = {}, {}
    for name, array in weights.items():
        plain = name.removeprefix("model.").removeprefix("language_model.")
        prefix = max((each for each in prefixes if plain.startswith(each)), key=len, default=None)
        if prefix is None:
            text[name] = array
        else:
            encoder[prefixes[prefix] + plain.removeprefix(prefix)] = array
    return text, encoder

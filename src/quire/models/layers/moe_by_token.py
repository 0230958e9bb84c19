"""Two mixtures of experts, selected by a row's token (ERNIE 4.5 VL's technical report)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx

from quire.models.base import Module
from quire.models.layers.feed_forward import MLP
from quire.models.layers.moe import Mixture
from quire.models.shares import Cuts, Split, within


@dataclass(frozen=True)
class MixtureByToken:
    """Description of separate experts for text and for media, with an optional shared expert.

    Attributes:
        tokens: ids of media tokens and of the tokens around media.
    """

    text: Mixture
    media: Mixture
    tokens: tuple[int, ...]
    shared: MLP | None

    def module(self, hidden_size: int) -> Module:
        return SparseMoEByToken(self, hidden_size)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        (text, of_text), (media, of_media) = self.text.share(split), self.media.share(split)
        cuts = within("text_moe", of_text) | within("vision_moe", of_media)
        shared = self.shared
        if shared is not None:
            shared, found = shared.share(split)
            cuts |= within("shared_expert", found)
        return replace(self, text=text, media=media, shared=shared), cuts


class SparseMoEByToken(Module):
    """Computes a `MixtureByToken`.

    Only a row's token matters: generated tokens use the experts for text, unless they are media
    tokens. The number of media rows is unknown before the step runs, so both mixtures compute all
    rows. The experts for media are a third as wide as those for text.
    """

    def __init__(self, kind: MixtureByToken, hidden_size: int) -> None:
        super().__init__()
        self._tokens = mx.array(kind.tokens)
        self.text_moe = kind.text.module(hidden_size)
        self.vision_moe = kind.media.module(hidden_size)
        if kind.shared is not None:
            self.shared_expert = kind.shared.module(hidden_size)

    def __call__(self, x: mx.array, tokens: mx.array) -> mx.array:
        """Map `[T, hidden]` with int32 tokens `[T]` to `[T, hidden]`."""
        media = mx.any(tokens[:, None] == self._tokens, axis=-1)[:, None]
        y = mx.where(media, self.vision_moe(x), self.text_moe(x))
        return y + self.shared_expert(x) if "shared_expert" in self else y

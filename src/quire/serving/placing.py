"""Places media in prompts, where the template leaves a mark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from quire.core.errors import RequestError
from quire.core.media import MediaItem, PlacedMedia
from quire.media.parts import Parts

if TYPE_CHECKING:
    from quire.media.processors.base import MediaProcessor


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and the media whose placeholders are among them.

    Attributes:
        token_types: kinds of the tokens of a pair of texts; empty if all are of kind 0.
    """

    tokens: tuple[int, ...]
    media: tuple[PlacedMedia, ...] = ()
    token_types: tuple[int, ...] = ()


class MediaPlaces:
    """Replaces the marks of a rendered template by media placeholders.

    Args:
        processors: the model's media processors, by kind; empty for a text model.
        tokens: text of the token that marks media, by kind.
    """

    def __init__(self, processors: Mapping[str, MediaProcessor], tokens: Mapping[str, str]) -> None:
        self._processors = processors
        self._tokens = tokens
        self._marks = {
            each.placeholders.mark or tokens[kind]: kind for kind, each in processors.items()
        }
        self._numbered = {kind: each.placeholders.numbered for kind, each in processors.items()}

    @property
    def marks(self) -> frozenset[str]:
        """The marks in a rendered template that media replaces."""
        return frozenset(self._marks)

    @property
    def marks_by_kind(self) -> dict[str, str]:
        """The mark that media of each kind replaces."""
        return {kind: mark for mark, kind in self._marks.items()}

    def spell(self, rendered: str, files: Sequence[Parts]) -> str:
        """Return a rendered template with its marks replaced by the text around each file and its
        token.

        Text from outside contains no marks: `Controls` covers it.
        """
        tokens = {
            kind
            for mark, kind in self._marks.items()
            if mark == self._tokens[kind] and not self._numbered[kind]
        }
        if all(_bare(parts) and parts[0].item.kind in tokens for parts in files):
            return rendered
        following = iter(files)
        numbers = {kind: count() for kind in self._tokens}

        def words(found: re.Match[str]) -> str:
            kind, parts = self._marks[found[0]], next(following, None)
            if parts is None:
                return found[0]  # `place` refuses it
            token = self._tokens[kind]
            first = self._numbered[kind].format(next(numbers[kind]))
            return first + "".join(f"{part.before}{token}{part.after}" for part in parts)

        return re.sub("|".join(map(re.escape, self._marks)), words, rendered)

    def place(self, ids: Sequence[int], items: Sequence[MediaItem]) -> Prompt:
        """Return the prompt, with each item's placeholders in place of its kind's token.

        Raises:
            RequestError: the template has left an item out.
        """
        own = {kind: each.placeholders for kind, each in self._processors.items()}
        # Of several kinds it may be the same, such as of pictures and of a video's frames.
        known = {each.token for each in own.values()}
        places = [(at, token) for at, token in enumerate(ids) if token in known]
        if [token for _, token in places] != [own[item.kind].token for item in items]:
            raise RequestError(
                f"The model's chat template has placeholders for {len(places)} of "
                f"{len(items)} media items.",
                param="messages",
                code="unsupported_content",
            )
        tokens: list[int] = []
        placed: list[PlacedMedia] = []
        done = 0
        for (at, _), item in zip(places, items, strict=True):
            placeholders = own[item.kind]
            tokens += ids[done:at]
            tokens += placeholders.before
            placed.append(PlacedMedia(len(tokens), item))
            tokens += self._processors[item.kind].tokens(item)
            tokens += placeholders.after
            done = at + 1
        tokens += ids[done:]
        return Prompt(tuple(tokens), tuple(placed))


def _bare(parts: Parts) -> bool:
    """Return whether a file is one item without text."""
    return len(parts) == 1 and not parts[0].before and not parts[0].after

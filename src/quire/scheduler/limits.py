"""Context limits of a single sequence, and refusal of requests that could never fit."""

from __future__ import annotations

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import blocks_by_pool
from quire.cache.specs import KVGroup
from quire.core.errors import ContextOverflow, RequestError
from quire.core.figures import size
from quire.core.kv_format import KVFormat
from quire.core.media import CrossMedia
from quire.core.request import Request


class Limits:
    """The longest context, limited by the model and by the KV budget in each format.

    Args:
        max_context: the most tokens of a sequence, prompt and answer together.
    """

    def __init__(
        self, groups: tuple[KVGroup, ...], manager: BlockManager, block_size: int, max_context: int
    ) -> None:
        self.max_context = max_context
        self._groups = groups
        self._manager = manager
        self._size = block_size
        self._contexts: dict[tuple[KVFormat, int, int], int] = {}

    def check(
        self, request: Request, format: KVFormat, cross_media: tuple[CrossMedia, ...] = ()
    ) -> int:
        """Refuse a request that would not fit even with all the memory.

        Args:
            cross_media: the media that its tokens attend to through cross-attention layers.

        Returns:
            The most tokens that its sequence may have.

        Raises:
            RequestError: it would not fit; the message names the limit.
        """
        length = len(request.prompt)
        if length == 0:
            raise RequestError("prompt: must have at least one token", param="prompt")
        if request.max_tokens < 1:
            raise RequestError("max_tokens: must be at least 1", param="max_tokens")
        first = int(request.task.samples)  # room for the first token that is generated
        if length + first > self.max_context:
            raise ContextOverflow(length, self.max_context, param="prompt")
        room = self.context(format, _largest_item(request), cross_media)
        if length + first > room:
            budget = size(self._manager.capacity.budget)
            because = f"The server's KV cache, {budget}, holds no more."
            raise ContextOverflow(length, room, param="prompt", because=because)
        return room

    def context(
        self, format: KVFormat, item: int = 0, cross_media: tuple[CrossMedia, ...] = ()
    ) -> int:
        """Return the most tokens of a lone sequence in a format.

        Args:
            item: tokens of its largest media item that is computed in one step.
            cross_media: the media that its tokens attend to through cross-attention layers.
        """
        crossed = sum(-(-each.keys // self._size) for each in cross_media)
        key = format, item, crossed
        if key not in self._contexts:
            low, high = 0, self.max_context
            while low < high:
                middle = (low + high + 1) // 2
                if (
                    self.worst_case_bytes(format, middle, item, crossed=crossed)
                    <= self._manager.capacity.budget
                ):
                    low = middle
                else:
                    high = middle - 1
            self._contexts[key] = low
        return self._contexts[key]

    def worst_case_bytes(
        self, format: KVFormat, tokens: int, item: int = 0, crossed: int = 0
    ) -> int:
        """Return the most bytes that the blocks of a lone sequence with so many tokens take.

        Args:
            item: tokens of its largest media item that is computed in one step.
            crossed: blocks in a group for the media that it attends to.
        """

        def count(group: KVGroup) -> int:
            own = group.spec.max_blocks(tokens, self._size, item)
            return own if group.spec.cross is None else crossed

        return self._manager.capacity.bytes_of(blocks_by_pool(self._groups, format, count))


def _largest_item(request: Request) -> int:
    """Return the tokens of a request's largest item whose rows see each other; 0 without one."""
    return max((each.item.tokens for each in request.media if each.item.bidirectional), default=0)

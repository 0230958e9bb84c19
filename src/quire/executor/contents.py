"""Large bytes that plans name by key, so that plans stay small."""

from __future__ import annotations

from quire.cache.host_block import HostBlock
from quire.core.media import MediaKey


class Contents:
    """Features of media items, and blocks read from disk, for an executor's next steps.

    The engine adds them before it launches a plan that names them.
    """

    def __init__(self) -> None:
        self._features: dict[MediaKey, bytes] = {}
        self._blocks: dict[bytes, HostBlock] = {}

    def hold_features(self, key: MediaKey, features: bytes) -> None:
        """Keep an item's features, the encoder's input, until `release_features`."""
        self._features.setdefault(key, features)

    def release_features(self, key: MediaKey) -> None:
        """Drop the features of an item that no request has any more."""
        self._features.pop(key, None)

    def hold_block(self, name: bytes, block: HostBlock) -> None:
        """Keep a block until the plan that restores it was launched."""
        self._blocks[name] = block

    def features(self, key: MediaKey) -> bytes:
        """Return the features of an item."""
        return self._features[key]

    def block(self, name: bytes) -> HostBlock:
        """Return the restored block that a plan calls `name`."""
        return self._blocks[name]

    def drop_blocks(self, names: set[bytes] | None = None) -> None:
        """Drop blocks that were restored; None drops all."""
        for name in list(self._blocks) if names is None else names:
            self._blocks.pop(name, None)

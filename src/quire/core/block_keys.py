"""Keys of KV blocks: chained hashes of tokens, with numbers in place of media."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b, shake_128

from quire.core.kv_format import KVFormat
from quire.core.media import PlacedMedia

SHORT = 8
"""Bytes of a short key, used where a collision costs only time."""


@dataclass(frozen=True, slots=True)
class BlockNames:
    """The settings of a served model that enter the keys of its blocks.

    Attributes:
        fingerprint: hash of the weights.
        block_size: tokens per block.
        default: the default KV format.
        skipped: layers that packed formats leave plain.
        activation_bits: see `EngineConfig.activation_bits`.
    """

    fingerprint: str = ""
    block_size: int = 64
    default: KVFormat = field(default_factory=KVFormat)
    skipped: tuple[int, ...] = ()
    activation_bits: int = 16

    def format(self, wanted: KVFormat | None) -> KVFormat:
        """Return a request's format: its own or the default, with some layers left plain."""
        return (wanted or self.default).skipping(self.skipped)

    def root(self, format: KVFormat, salt: str) -> bytes:
        """Return the root of a hash chain: everything but tokens that shapes the blocks' bytes."""
        parts = [self.fingerprint, repr(format), str(self.block_size), salt]
        if self.activation_bits != 16:
            parts.append(f"activations of {self.activation_bits} bits")
        return blake2b("\x00".join(parts).encode(), digest_size=24).digest()


def chain(parent: bytes, tokens: Seq[int]) -> bytes:
    """Return the key of a block, from the key of the block before it and the block's tokens."""
    return next(chains(parent, tokens, max(1, len(tokens))))


def chains(parent: bytes, tokens: Seq[int], block_size: int) -> Iterator[bytes]:
    """Return the keys of consecutive blocks."""
    for start in range(0, len(tokens), block_size):
        data = _packed(tokens[start : start + block_size])
        parent = blake2b(data, key=parent, digest_size=24).digest()
        yield parent


def _packed(tokens: Seq[int]) -> bytes:
    """Return tokens as bytes: 32 bits each, or 64 if some represent media (`media_tokens`)."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens.tobytes()
    try:
        return array("i", tokens).tobytes()
    except OverflowError:
        return array("q", tokens).tobytes()


def media_tokens(digest: bytes, count: int) -> array[int]:
    """Return the `count` numbers that represent an item's soft tokens in the prefix index.

    They are derived from the item's digest and lie outside 32 bits, so no text token equals them.
    62 bits tell media apart.
    """
    numbers = array("q", shake_128(digest).digest(8 * count))
    return array("q", (-(1 << 62) - (number & (1 << 62) - 1) - 1 for number in numbers))


def content_of(prompt: Seq[int], media: Seq[PlacedMedia]) -> array[int]:
    """Return a prompt's tokens as block keys use them, with numbers in place of media."""
    if not media:
        return array("i", prompt)
    content = array("q", prompt)
    for placed in media:
        content[placed.start : placed.end] = media_tokens(placed.item.digest, placed.item.tokens)
    return content


def lasting_name(key: bytes, group: int) -> bytes:
    """Return the name on disk of a full block, or of a state at its end."""
    return key + bytes([group])

"""Names blocks by what shaped their bytes: chained hashes of tokens, and numbers for media."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from hashlib import blake2b, shake_128


def chain(parent: bytes, tokens: Seq[int]) -> bytes:
    """Return the identity of a block: all that shaped its bytes, ending in its own tokens."""
    return next(chains(parent, tokens, max(1, len(tokens))))


def chains(parent: bytes, tokens: Seq[int], block_size: int) -> Iterator[bytes]:
    """Return the identities of one block after the other."""
    for start in range(0, len(tokens), block_size):
        data = _packed(tokens[start : start + block_size])
        parent = blake2b(data, key=parent, digest_size=24).digest()
        yield parent


def _packed(tokens: Seq[int]) -> bytes:
    """32 bits a token; 64 where some stand for media (`media_tokens`)."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens.tobytes()
    try:
        return array("i", tokens).tobytes()
    except OverflowError:
        return array("q", tokens).tobytes()


def media_tokens(digest: bytes, count: int) -> array[int]:
    """Return the `count` numbers that stand for an item's soft tokens in the prefix index.

    Numbers drawn from the digest of what they were made from, below all that 32 bits hold: no text
    has them, and each tells one medium from another by 62 bits.
    """
    numbers = array("q", shake_128(digest).digest(8 * count))
    return array("q", (-(1 << 62) - (number & (1 << 62) - 1) - 1 for number in numbers))


def lasting_name(key: bytes, group: int) -> bytes:
    """Return the name of a full block, or of a state at its end, on disk."""
    return key + bytes([group])

"""Signatures for reasoning that clients carry between turns, so that changes are detected.

A signature goes with reasoning that the client can read. Packed reasoning also contains the text,
for clients that asked not to be shown it. It is compressed, not encrypted: the client may read it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import zlib

_VERSION = "q1"


class Signer:
    """Signs reasoning with a key.

    Args:
        key: the key; None means a random one, which only this process can verify.
    """

    def __init__(self, key: str | None = None) -> None:
        self._key = key.encode() if key is not None else secrets.token_bytes(32)

    def sign(self, reasoning: str) -> str:
        """Return the signature of reasoning."""
        return f"{_VERSION}.{_encode(self._mac(reasoning))}"

    def verifies(self, reasoning: str, signature: str) -> bool:
        """Return whether a signature, or packed reasoning, was made here for exactly this text."""
        return hmac.compare_digest(self._head(signature).encode(), self.sign(reasoning).encode())

    def pack(self, reasoning: str) -> str:
        """Return reasoning compressed, with its signature."""
        packed = zlib.compress(reasoning.encode("utf-8", "surrogatepass"))
        return f"{self.sign(reasoning)}.{_encode(packed)}.{self._mark(packed)}"

    def open(self, signed: str) -> str | None:
        """Return reasoning that was packed here; None for anything else."""
        head, _, rest = signed.removeprefix(f"{_VERSION}.").partition(".")
        body, _, mark = rest.partition(".")
        try:
            packed = base64.urlsafe_b64decode(body.encode())
            # Ahead of unpacking: what a stranger has packed may be a thousand times as long.
            if not hmac.compare_digest(mark.encode(), self._mark(packed).encode()):
                return None
            reasoning = zlib.decompress(packed).decode("utf-8", "surrogatepass")
        except (binascii.Error, zlib.error, UnicodeError):
            return None
        return reasoning if self.verifies(reasoning, f"{_VERSION}.{head}") else None

    def _mark(self, packed: bytes) -> str:
        """Return the proof that `packed` was compressed here."""
        return _encode(hmac.digest(self._key, b"packed" + packed, "sha256"))

    def _mac(self, reasoning: str) -> bytes:
        return hmac.digest(self._key, reasoning.encode("utf-8", "surrogatepass"), "sha256")

    @staticmethod
    def _head(signed: str) -> str:
        """Return the signature at the start of packed reasoning."""
        return ".".join(signed.split(".", 2)[:2])


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode()

"""Reasoning that clients carry between turns, sealed so that what comes back is what went out.

A signature proves reasoning that is sent in the open beside it. Sealed reasoning holds the text
as well, for clients that asked not to be shown it; it is compressed, not encrypted: what a model
tells a client is no secret from that client.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import zlib

_VERSION = "q1"


class Seal:
    """Signs reasoning with a key.

    Args:
        key: None draws one, so that only this process knows its own reasoning again.
    """

    def __init__(self, key: str | None = None) -> None:
        self._key = key.encode() if key is not None else secrets.token_bytes(32)

    def sign(self, reasoning: str) -> str:
        """The signature of reasoning that is shown beside it."""
        return f"{_VERSION}.{_encode(self._mac(reasoning))}"

    def verifies(self, reasoning: str, signature: str) -> bool:
        """Whether `signature`, or the sealed reasoning, was made here for this very text."""
        return hmac.compare_digest(self._head(signature).encode(), self.sign(reasoning).encode())

    def seal(self, reasoning: str) -> str:
        """The reasoning itself, signed."""
        packed = zlib.compress(reasoning.encode("utf-8", "surrogatepass"))
        return f"{self.sign(reasoning)}.{_encode(packed)}.{self._mark(packed)}"

    def open(self, sealed: str) -> str | None:
        """The reasoning that was sealed here; None for anything else."""
        head, _, rest = sealed.removeprefix(f"{_VERSION}.").partition(".")
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
        """Proves that reasoning was packed here."""
        return _encode(hmac.digest(self._key, b"packed" + packed, "sha256"))

    def _mac(self, reasoning: str) -> bytes:
        return hmac.digest(self._key, reasoning.encode("utf-8", "surrogatepass"), "sha256")

    @staticmethod
    def _head(sealed: str) -> str:
        """The signature that sealed reasoning begins with."""
        return ".".join(sealed.split(".", 2)[:2])


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode()

"""The alphabet in which byte-level tokenizers spell bytes, introduced by GPT-2."""

from __future__ import annotations


def _letters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(rest)
    }


BYTE_OF = _letters()
"""The byte that each of the alphabet's 256 letters represents."""
LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}
"""The letter that represents each byte."""


def spelled(text: bytes) -> str:
    """Return the letter of each byte."""
    return "".join(LETTER_OF[byte] for byte in text)

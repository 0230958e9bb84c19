"""The KV formats and their spellings. Pure Python.

Shared by the HTTP side for requests, the CLI for flags, and the engine for settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quire.core.errors import RequestError
from quire.core.kv_format import KVFormat

DEFAULT_SCHEME = "page"
"""Scheme of a request that gives only bits."""

DTYPES = ("float32", "float16", "bfloat16")
GROUP_SIZES = (64, 32)
_BITS = (8, 6, 5, 4, 3, 2)
_PAIRS = "or two numbers such as 8/4, for keys and values"
_TURBO_BITS = (4, 3.5, 3, 2)

_NAME = re.compile(r"(?P<scheme>[a-z]+)(?:-(?P<rest>.*))?")
_PACKED = re.compile(r"(?P<key>[\d.]+)(?:/(?P<value>[\d.]+))?(?:-g(?P<group>\d+))?")


def offered(block_size: int, group_size: int = 64) -> tuple[KVFormat, ...]:
    """Return the formats that fit a block size; `group_size` is the first choice."""
    formats = [KVFormat(), *(KVFormat(dtype=dtype) for dtype in DTYPES)]
    if block_size % 32 == 0:  # packed words hold the codes of 32 tokens
        pairs = [(k, v) for k in _BITS for v in _BITS]
        formats += [KVFormat("page", k, v) for k, v in sorted(pairs, key=lambda p: p[0] != p[1])]
    for size in sorted(GROUP_SIZES, key=lambda size: size != group_size):
        formats += [KVFormat("uniform", bits, bits, group_size=size) for bits in _BITS]
    return (*formats, *(KVFormat("turbo", bits, bits) for bits in _TURBO_BITS))


def parse_format(name: str) -> KVFormat:
    """Return the format whose `KVFormat.name` is `name`, with no layer skipped.

    Raises:
        ValueError: no format has this name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"no KV format is called {name!r}")
    scheme, rest = match["scheme"], match["rest"] or ""
    if scheme == "plain":
        return KVFormat(dtype=rest)
    packed = _PACKED.fullmatch(rest)
    if packed is None:
        raise ValueError(f"no KV format is called {name!r}")
    key = float(packed["key"])
    value = float(packed["value"]) if packed["value"] else key
    return KVFormat(scheme, key, value, group_size=int(packed["group"] or 64))


def choose_format(
    names: Iterable[str], bits: float | str | None, scheme: str | None
) -> KVFormat | None:
    """Return the format that a request asks for; None leaves it to the server.

    Bits alone mean the `page` scheme; `none` or 0 bits, and the scheme `plain`, mean no packing. A
    floating type's name is a scheme too: plain blocks of that type.

    Args:
        names: `ModelInfo.kv_formats`, the formats that a request may choose.

    Raises:
        RequestError: code `invalid_kv_scheme` or `invalid_kv_bits`, listing what is offered.
    """
    if bits is None and scheme is None:
        return None
    formats = [parse_format(name) for name in names]
    schemes = list(dict.fromkeys(_scheme_of(each) for each in formats))
    if scheme is not None and scheme not in schemes:
        raise _invalid("kv_scheme", scheme, schemes)
    wanted = None if bits is None else _spelled(bits)
    if scheme is None:
        scheme = "plain" if wanted == "none" else DEFAULT_SCHEME
    known = [each for each in formats if _scheme_of(each) == scheme]
    if wanted is None and scheme in ("plain", *DTYPES):
        wanted = "none"
    for each in known:
        if _bits_of(each) == wanted:
            return each
    bits_offered = _listed([_bits_of(each) for each in known])
    raise _invalid("kv_bits", bits, bits_offered, where=f" in the scheme '{scheme}'")


def _listed(bits: list[str]) -> list[str]:
    """Return the offered bits as text. If all pairs are offered, one entry stands for them."""
    single = [each for each in bits if "/" not in each]
    pairs = {f"{key}/{value}" for key in single for value in single if key != value}
    return [*single, "none", _PAIRS] if pairs and pairs <= set(bits) else bits


def _scheme_of(format: KVFormat) -> str:
    return format.dtype or format.scheme


def _bits_of(format: KVFormat) -> str:
    """Return a format's bits as a request spells them: `4`, `8/4`, `none` for plain."""
    if format.scheme == "plain":
        return "none"
    key, value = f"{format.key_bits:g}", f"{format.value_bits:g}"
    return key if key == value else f"{key}/{value}"


def _spelled(bits: float | str) -> str:
    """Return a request's bits in the spelling of `_bits_of`."""
    text = f"{bits:g}" if isinstance(bits, int | float) else bits.strip().lower()
    if text in ("0", "none", "plain", "null"):
        return "none"
    halves = []
    for half in text.split("/"):
        try:
            halves.append(f"{float(half):g}")
        except ValueError:
            return text
    return halves[0] if len(set(halves)) == 1 else "/".join(halves)


def _invalid(param: str, value: object, offered: Iterable[str], where: str = "") -> RequestError:
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value  # JSON's 7 is read as 7.0
    said = "is needed" if value is None else f"cannot be {value!r}"
    return RequestError(
        f"'{param}' {said}{where}. Offered: {', '.join(dict.fromkeys([*offered, 'none']))}.",
        param=param,
        code=f"invalid_{param}",
    )

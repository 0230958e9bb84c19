"""Which KV format a request asks for, by field or by header."""

from __future__ import annotations

import re

from quire.cache.specs import KVFormat
from quire.errors import RequestError

BITS_HEADER = "x-quire-kv-bits"
SCHEME_HEADER = "x-quire-kv-scheme"

_NAME = re.compile(r"(?P<scheme>[a-z]+)(?:-(?P<rest>.*))?")
_PACKED = re.compile(r"(?P<key>[\d.]+)(?:/(?P<value>[\d.]+))?(?:-g(?P<group>\d+))?")
_DEFAULT_SCHEME = "page"


def parse_format(name: str) -> KVFormat:
    """The format whose `KVFormat.name` is `name`, with no layer skipped.

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
    return KVFormat(
        scheme=scheme,
        key_bits=key,
        value_bits=float(packed["value"]) if packed["value"] else key,
        group_size=int(packed["group"]) if packed["group"] else 64,
    )


def _bits_of(offered: KVFormat) -> str:
    """A format's bits as a request spells them: `4`, `8/4`, `none` for plain."""
    if offered.scheme == "plain":
        return "none"
    key, value = f"{offered.key_bits:g}", f"{offered.value_bits:g}"
    return key if key == value else f"{key}/{value}"


def _spelled(bits: float | str) -> str:
    """The bits that a request names, spelled as `_bits_of` spells them."""
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


def choose_format(
    names: tuple[str, ...], bits: float | str | None, scheme: str | None
) -> KVFormat | None:
    """The format that a request asks for; None leaves it to the server.

    Bits alone mean the `page` scheme; `none` or 0 bits, and the scheme `plain`, mean no packing.

    Args:
        names: `ModelInfo.kv_formats`, the formats that a request may choose.

    Raises:
        RequestError: code `invalid_kv_scheme` or `invalid_kv_bits`, listing what is offered.
    """
    if bits is None and scheme is None:
        return None
    offered = [parse_format(name) for name in names]
    schemes = list(dict.fromkeys(each.scheme for each in offered))
    if scheme is not None and scheme not in schemes:
        raise _invalid("kv_scheme", scheme, schemes)
    wanted = None if bits is None else _spelled(bits)
    if scheme is None:
        scheme = "plain" if wanted == "none" else _DEFAULT_SCHEME
    if wanted is None and scheme == "plain":
        wanted = "none"
    for each in offered:
        if each.scheme == scheme and _bits_of(each) == wanted:
            return each
    known = [_bits_of(each) for each in offered if each.scheme == scheme]
    raise _invalid("kv_bits", bits, list(dict.fromkeys([*known, "none"])))


def _invalid(param: str, value: object, offered: list[str]) -> RequestError:
    said = "is needed beside 'kv_scheme'" if value is None else f"cannot be '{value}'"
    return RequestError(
        f"'{param}' {said}; offered are: {', '.join(offered)}.",
        param=param,
        code=f"invalid_{param}",
    )

"""The flags that choose how the KV cache is stored."""

from __future__ import annotations

import argparse

from quire.core.kv_choice import GROUP_SIZES, choose_format, offered
from quire.core.kv_format import KVFormat


def add_kv_arguments(group: argparse._ActionsContainer) -> None:
    """Declares `--kv-bits`, `--kv-scheme`, `--kv-group-size` and `--kv-skip-layers`."""
    group.add_argument(
        "--kv-bits",
        metavar="BITS",
        help="code the KV cache in 8, 6, 5, 4, 3 or 2 bits, keys and values apart as in 8/4",
    )
    group.add_argument(
        "--kv-scheme",
        metavar="SCHEME",
        help="page (default with --kv-bits), uniform, turbo, plain, float32, float16 or bfloat16",
    )
    group.add_argument(
        "--kv-group-size",
        type=int,
        choices=GROUP_SIZES,
        default=64,
        help="elements that share a scale in the uniform scheme",
    )
    group.add_argument(
        "--kv-skip-layers",
        type=_layers,
        metavar="LAYERS",
        help="layers left plain, as in 5,11, or none; default: the last full-attention layer",
    )


def format_of(arguments: argparse.Namespace, page_tokens: int = 64) -> KVFormat:
    """The format that the flags of `add_kv_arguments` ask for.

    Raises:
        RequestError: there is none such.
    """
    names = [each.name for each in offered(page_tokens, arguments.kv_group_size)]
    return choose_format(names, arguments.kv_bits, arguments.kv_scheme) or KVFormat()


def _layers(text: str) -> tuple[int, ...]:
    if text.strip().lower() == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers, nor 'none'") from None

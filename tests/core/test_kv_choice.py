"""KV formats: their names, which are offered or refused, and which layers stay plain."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.cache.formats.skips import skipped_layers
from quire.cache.specs import FullKV, RecurrentState, SharedKV, WindowKV
from quire.cli.model_options import KVOptions
from quire.core.errors import ModelError, QuireError, RequestError
from quire.core.kv_choice import choose_format, offered, parse_format
from quire.core.kv_format import KVFormat

NAMES = tuple(format.name for format in offered(64))


@pytest.mark.parametrize("format", offered(64), ids=lambda format: format.name)
def test_names_are_read_back(format: KVFormat) -> None:
    assert parse_format(format.name) == format
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(
    ("bits", "scheme", "want"),
    [
        (None, None, None),
        (4, None, KVFormat("page", 4, 4)),
        (8.0, None, KVFormat("page", 8, 8)),
        ("8/4", None, KVFormat("page", 8, 4)),
        ("4/4", "page", KVFormat("page", 4, 4)),
        (4, "uniform", KVFormat("uniform", 4, 4, 64)),
        ("3.5", "turbo", KVFormat("turbo", 3.5, 3.5)),
        (0, None, KVFormat()),
        ("none", None, KVFormat()),
        (None, "plain", KVFormat()),
        (None, "float16", KVFormat(dtype="float16")),
    ],
)
def test_requests_choose(
    bits: float | str | None, scheme: str | None, want: KVFormat | None
) -> None:
    assert choose_format(NAMES, bits, scheme) == want


@pytest.mark.parametrize(
    ("bits", "scheme", "param", "named"),
    [
        (7.0, None, "kv_bits", "or two numbers such as 8/4"),
        ("4/x", None, "kv_bits", "4"),
        (8, "turbo", "kv_bits", "3.5"),
        ("8/4", "uniform", "kv_bits", "8"),
        (4, "plain", "kv_bits", "none"),
        (None, "page", "kv_bits", "4"),
        (4, "kivi", "kv_scheme", "turbo"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    bits: float | str | None, scheme: str | None, param: str, named: str
) -> None:
    with pytest.raises(RequestError) as refused:
        choose_format(NAMES, bits, scheme)
    assert refused.value.code == f"invalid_{param}"
    assert refused.value.param == param
    assert scheme is None or scheme in refused.value.message
    assert "7.0" not in refused.value.message
    assert named in refused.value.message.split("Offered: ")[1].rstrip(".").split(", ")


def test_pages_too_short_to_pack_are_not_offered() -> None:
    assert {format.scheme for format in offered(16)} == {"plain", "uniform", "turbo"}


LAYOUT = (
    WindowKV(1, 8, 4),
    FullKV(1, 8),
    RecurrentState(()),
    FullKV(1, 8),
    WindowKV(1, 8, 4),
    SharedKV(3),
)


def test_the_last_full_layer_stays_plain_by_default() -> None:
    assert skipped_layers(LAYOUT, None) == (3,)
    assert skipped_layers(LAYOUT, ()) == ()
    assert skipped_layers(LAYOUT, (4, 0, 4)) == (0, 4)
    assert skipped_layers(LAYOUT[:2], None) == ()
    assert KVFormat().skipping((3,)) == KVFormat()
    assert KVFormat("page", 4, 4).skipping((3,)).skip_layers == (3,)


@pytest.mark.parametrize(("layer", "said"), [(6, "has 6"), (5, "cache of 3"), (2, "keeps no")])
def test_layers_without_a_cache_cannot_be_skipped(layer: int, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        skipped_layers(LAYOUT, (layer,))


def test_options() -> None:
    given = KVOptions(kv_bits="8/4", kv_skip_layers="1,3")
    assert (given.kv_format(), given.kv_skip_layers) == (KVFormat("page", 8, 4), (1, 3))
    uniform = {"kv_bits": 4, "kv_scheme": "uniform", "kv_group_size": "32"}
    given = KVOptions(**uniform, kv_skip_layers="none")
    assert (given.kv_format(), given.kv_skip_layers) == (KVFormat("uniform", 4, 4, 32), ())
    assert KVOptions().kv_format() == KVFormat()
    with pytest.raises(QuireError):
        KVOptions(kv_bits="7").kv_format()


def test_choosing_needs_no_mlx() -> None:
    """The HTTP process chooses formats and never imports mlx."""
    code = "import sys, quire.core.kv_choice; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

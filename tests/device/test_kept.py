"""What is kept about kernels from one start to the next."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from quire.attention.backend import AttentionCase
from quire.cache.specs import WindowKV
from quire.core.kv_format import KVFormat
from quire.device.kept import Claim, Fact, Kept

ATTENTION = Fact(Claim.ATTENTION_AGREES)


def test_a_fact_holds_for_the_versions_that_it_was_found_with(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    kept = Kept(folder, "card 1, MLX 2")
    assert not kept.holds(ATTENTION)
    kept.note(ATTENTION)
    assert kept.holds(ATTENTION)
    assert Kept(folder, "card 1, MLX 2").holds(ATTENTION)
    assert not kept.holds(Fact(Claim.PRODUCTS_AGREE))
    assert not Kept(folder, "card 1, MLX 3").holds(ATTENTION)


def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for kept in (Kept(None, ""), Kept(tmp_path / "file", "")):
        kept.note(ATTENTION)
        assert not kept.holds(ATTENTION)


def test_equal_facts_have_one_key_in_any_process() -> None:
    def case(rows: int, window: int) -> AttentionCase:
        spec = WindowKV(2, 64, window)
        return AttentionCase(KVFormat("page", 4, 4), spec, 64, 8, rows, mx.bfloat16, False, False)

    facts = [
        Fact(claim, ("a backend", case(rows, window)))
        for claim in (Claim.ATTENTION_AGREES, Claim.CODING_AGREES)
        for rows in (1, 2)
        for window in (8, 9)
    ]
    again = Fact(Claim.ATTENTION_AGREES, ("a backend", case(1, 8)))
    assert again.key == facts[0].key
    assert len({fact.key for fact in facts}) == len(facts)
    assert Fact(Claim.COMPILED, 1).key != Fact(Claim.COMPILED, "1").key


@pytest.mark.parametrize("subject", [object(), {"a"}, [len], (1, print)])
def test_what_differs_between_processes_is_no_subject(subject: object) -> None:
    with pytest.raises(TypeError, match="no key"):
        _ = Fact(Claim.COMPILED, subject).key

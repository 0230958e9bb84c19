"""Records of verified kernels."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from quire.attention.backend import AttentionCase
from quire.cache.specs import WindowKV
from quire.core.kv_format import KVFormat
from quire.device import verified
from quire.device.verified import Check, Verification, VerifiedKernels, kept_choice

ATTENTION = Verification(Check.ATTENTION_AGREES)


def test_a_verification_holds_for_its_versions_only(tmp_path: Path) -> None:
    folder = tmp_path / "verified"
    own = VerifiedKernels(folder, "card 1, MLX 2")
    assert not own.holds(ATTENTION)
    own.add(ATTENTION)
    assert own.holds(ATTENTION)
    assert VerifiedKernels(folder, "card 1, MLX 2").holds(ATTENTION)
    assert not own.holds(Verification(Check.PRODUCTS_AGREE))
    assert not VerifiedKernels(folder, "card 1, MLX 3").holds(ATTENTION)


def test_without_a_folder_nothing_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for own in (VerifiedKernels(None, ""), VerifiedKernels(tmp_path / "file", "")):
        own.add(ATTENTION)
        assert not own.holds(ATTENTION)


def test_a_choice_is_made_once_for_its_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept, subject = VerifiedKernels(tmp_path, "card 1"), Verification(Check.QUICKEST_PROPOSAL, "x")
    monkeypatch.setattr(verified, "verified_kernels", lambda: kept)
    assert [kept_choice(subject, lambda chosen=chosen: chosen) for chosen in (3, 4)] == [3, 3]
    kept.add(subject, "not a number")
    assert kept_choice(subject, lambda: 5) == 5
    monkeypatch.setattr(verified, "verified_kernels", lambda: VerifiedKernels(tmp_path, "card 2"))
    assert kept_choice(subject, lambda: 6) == 6


def test_equal_verifications_have_one_key_in_any_process() -> None:
    def case(rows: int, window: int) -> AttentionCase:
        spec = WindowKV(2, 64, window)
        return AttentionCase(KVFormat("page", 4, 4), spec, 64, 8, rows, mx.bfloat16, False, False)

    verifications = [
        Verification(check, ("a backend", case(rows, window)))
        for check in (Check.ATTENTION_AGREES, Check.CODING_AGREES)
        for rows in (1, 2)
        for window in (8, 9)
    ]
    again = Verification(Check.ATTENTION_AGREES, ("a backend", case(1, 8)))
    assert again.key == verifications[0].key
    assert len({each.key for each in verifications}) == len(verifications)
    assert Verification(Check.COMPILED, 1).key != Verification(Check.COMPILED, "1").key


@pytest.mark.parametrize("subject", [object(), {"a"}, [len], (1, print)])
def test_values_that_differ_between_processes_are_refused_as_subjects(subject: object) -> None:
    with pytest.raises(TypeError, match="no key"):
        _ = Verification(Check.COMPILED, subject).key

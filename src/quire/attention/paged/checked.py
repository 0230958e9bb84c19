"""Backends that serve a kind of layer only if they agree with the reference on this machine."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from quire.attention.backend import AttentionBackend, AttentionCase
from quire.attention.paged.check import SINGLE_ROWS, SPANS, differs
from quire.cache.specs import FullKV
from quire.core.kv_format import KVFormat
from quire.device.verified import Check, SoundKernels, Verification

log = logging.getLogger("quire.attention")

SAMPLE = AttentionCase(
    KVFormat(), FullKV(2, 64), 64, heads=8, rows=1, dtype=mx.bfloat16, softcap=False, sinks=False
)
"""A small layer over plain blocks."""


class CheckedBackend(AttentionBackend):
    """Kernels that are not used where they differ from the reference or do not compile.

    Attributes:
        sample: a case that the kernels support, for `problem`; `SAMPLE` unless said otherwise.
    """

    sample: ClassVar[AttentionCase] = SAMPLE
    _sound: ClassVar = SoundKernels(log, "Attention kernels", "another backend is used")
    """By backend and kind of layer."""

    @abstractmethod
    def made_for(self, case: AttentionCase) -> bool:
        """Return whether the kernels are meant for a case, before they are checked."""

    def serves(self, case: AttentionCase) -> bool:
        if case.chosen or case.beside or case.values_by_channel:
            return False
        return self.made_for(case) and self._difference(case) is None

    @property
    def problem(self) -> str | None:
        return self._difference(self.sample)

    def _difference(self, case: AttentionCase) -> str | None:
        key = self.name, replace(case, rows=1)  # the check tries other numbers too
        verification = Verification(Check.ATTENTION_AGREES, key)
        return self._sound.problem(key, lambda: self._first_difference(case), verification)

    def _first_difference(self, case: AttentionCase) -> str | None:
        spans = [SINGLE_ROWS]
        if self.made_for(replace(case, rows=2)):
            spans.append(SPANS)
        found = (differs(self, case, each) for each in spans)
        return next((each for each in found if each is not None), None)

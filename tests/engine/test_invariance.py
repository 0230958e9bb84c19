"""`--batch-invariant` takes or refuses models; `test_exact.py` and `test_recorded_gpu.py` test its
bits.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, RequestError
from quire.core.kv_format import KVFormat
from quire.core.request import Embed, Request
from quire.engine import invariance
from quire.engine.invariance import check_format, check_invariant, limited

ASKED = EngineConfig("", batch_invariant=True, max_sequences=200)
PAGE = KVFormat("page", 4, 4)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(kernels=None, kernel_language="cuda")
    monkeypatch.setattr(invariance, "current_device", lambda: device)


@pytest.mark.usefixtures("cuda")
def test_steps_are_no_larger_than_recorded_ones() -> None:
    config = limited(ASKED)
    assert (config.max_step_tokens, config.max_sequences) == (64, 64)
    assert limited(EngineConfig("")) == EngineConfig("")


@pytest.mark.usefixtures("cuda")
def test_what_recorded_steps_do_not_compute_is_refused() -> None:
    float16 = KVFormat(dtype="float16")
    check_format(ASKED, PAGE, {PAGE}.__contains__)
    check_format(EngineConfig(""), float16, {PAGE}.__contains__)
    with pytest.raises(ModelError, match="batch_invariant: not possible with a plain-float16 KV"):
        check_format(ASKED, float16, {PAGE}.__contains__)
    check_invariant(ASKED, Request("r", (1,), kv_format=KVFormat()))
    with pytest.raises(RequestError, match="its own KV format alone, plain"):
        check_invariant(ASKED, Request("r", (1,), kv_format=PAGE))
    check_invariant(replace(ASKED, kv_format=PAGE), Request("r", (1,), kv_format=PAGE))
    with pytest.raises(RequestError, match="supports no embeddings"):
        check_invariant(ASKED, Request("r", (1,), task=Embed()))


def test_other_devices_say_that_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    metal = SimpleNamespace(kernels=None, kernel_language="metal")
    monkeypatch.setattr(invariance, "current_device", lambda: metal)
    with pytest.raises(ModelError, match="batch_invariant: needs an NVIDIA GPU"):
        limited(ASKED)
    with_kernels = SimpleNamespace(kernels=object(), kernel_language="")
    monkeypatch.setattr(invariance, "current_device", lambda: with_kernels)
    assert limited(ASKED) is ASKED

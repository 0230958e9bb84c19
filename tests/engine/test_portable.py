"""An engine whose rows that generate are attended by the portable kernels, emulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from quire.attention.backend import AttentionCase, Backends
from quire.attention.paged import PortableBackend
from quire.attention.paged.target import METAL
from quire.attention.reference import ReferenceBackend
from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.executor import eager
from quire.models.weights.loader import open_model
from tests.support.emulated_metal import emulate, why_not
from tests.support.parity import SCENARIOS, alone, assert_same, prompts
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


class _Noting(PortableBackend):
    """A backend that notes what it serves."""

    served: set[AttentionCase]

    def serves(self, case: AttentionCase) -> bool:
        if serves := super().serves(case):
            self.served.add(case)
        return serves


@pytest.mark.parametrize(
    ("family", "format"), [("llama", "plain"), ("gemma4", "plain"), ("gemma4", "page-8")]
)
def test_answers_are_the_references(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, format: str
) -> None:
    folder = tiny_model(tmp_path, family)
    loaded = open_model(str(folder), dtype="float32")
    config = EngineConfig(
        str(folder),
        kv_memory=64 << 20,
        kv_format=parse_format(format),
        kv_skip_layers=(),
        prefix_cache=False,
    )
    wanted = prompts(tokens=12)
    expected = alone(loaded, config, wanted)
    backend = _Noting(replace(METAL, compile=emulate), [mx.float32])
    backend.served = set()
    backends = Backends([backend, ReferenceBackend()])
    monkeypatch.setattr(eager, "open_backends", lambda: backends)
    got = SCENARIOS["in chunks of 33"](loaded, config, wanted)
    assert_same(got, expected, [request.id for request in wanted])
    assert {case.format.name for case in backend.served} == {format}

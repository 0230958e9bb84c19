"""What is added from outside works as what is built in, by one line in its registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cache.formats.registry import SCHEMES
from quire.cache.formats.uniform import UniformStore
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import FinishReason
from quire.models.loader import open_model
from quire.text.dialects import DIALECTS, choose_dialect
from quire.text.dialects.base import Dialect, Vocabulary
from quire.text.dialects.machine import Layout, Machine
from quire.text.events import Reasoning, Text
from tests.support.parity import Company, prompts
from tests.support.tiny_models import tiny_model


class _Coarse(UniformStore):
    """A KV format of its own name, whose codes have half the bits."""

    @classmethod
    def bits(cls, format: KVFormat) -> tuple[int, int]:
        key, value = super().bits(format)
        return key // 2, value // 2


def test_a_kv_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "coarse", _Coarse)
    loaded = open_model(str(tiny_model(tmp_path, "llama")), dtype="float32")
    answers = [
        Company(loaded, EngineConfig(model="", kv_memory=8 << 20, kv_format=format)).run(
            prompts((5, 70), tokens=8)
        )
        for format in (KVFormat("coarse", 8, 8), KVFormat("uniform", 4, 4))
    ]
    assert [each.tokens for each in answers[0].values()] == [
        each.tokens for each in answers[1].values()
    ]


def test_a_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(reasoning=(frozenset({"<hm>"}), frozenset({"</hm>"})))
    new = Dialect(
        name="new",
        recognises=lambda template, model_type: False,
        build=lambda start: Machine(layout, start),
        reasoning=("<hm>", "</hm>"),
    )
    monkeypatch.setitem(DIALECTS, new.name, new)
    assert choose_dialect("", "llama", "new") is new
    vocabulary = Vocabulary({}, lambda text: (), lambda ids: "")
    parser = new.parser((), (), vocabulary)
    found = [*parser.feed(-1, "<hm>Two.</hm>It is 2."), *parser.finish(FinishReason.STOP)]
    assert found == [Reasoning("Two."), Text("It is 2.")]

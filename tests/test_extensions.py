"""Extensions from outside work like built-in ones, by one line in a registry."""

from __future__ import annotations

import base64
import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.cache.formats.registry import SCHEMES
from quire.cache.formats.uniform import UniformStore
from quire.cli.media_options import MediaOptions, with_media_limits
from quire.core.config import EngineConfig, ServerConfig
from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem
from quire.core.request import FinishReason, SamplingParams
from quire.core.values import Values
from quire.demo import MODEL_DIR
from quire.media.kinds import KINDS, Kind, MediaInput
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import MediaProcessor, Placeholders
from quire.media.source import Detail, FileLimits, MediaLimits, refusal
from quire.models.base import MediaEncoder
from quire.models.weights.loader import LoadedModel, open_model
from quire.text.dialects import DIALECTS, choose_dialect
from quire.text.dialects.base import Dialect, Vocabulary
from quire.text.dialects.marker_parser import Layout, MarkerParser
from quire.text.events import Reasoning, Text
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, start
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
        build=lambda start: MarkerParser(layout, start),
        reasoning=("<hm>", "</hm>"),
    )
    monkeypatch.setitem(DIALECTS, new.name, new)
    assert choose_dialect("", "llama", "new") is new
    vocabulary = Vocabulary({}, lambda text: (), lambda ids: "")
    parser = new.parser((), (), vocabulary)
    found = [*parser.feed(-1, "<hm>Two.</hm>It is 2."), *parser.finish(FinishReason.STOP)]
    assert found == [Reasoning("Two."), Text("It is 2.")]


_PLACEHOLDER = 21


class _ScentProcessor(MediaProcessor):
    """A file holds a byte for each moment of a smell."""

    kind = "scent"

    @classmethod
    def open(cls, settings: Values, config: Values) -> _ScentProcessor:
        return cls(Placeholders(config.integer("scent_token_id")))

    def prepare(self, data: bytes, param: str, detail: Detail, limits: FileLimits) -> Parts:
        if len(data) > limits.seconds:
            raise refusal(param, f"it lasts {len(data)} s", "too_large")
        item = MediaItem.of("scent", data, (len(data),), len(data), bidirectional=False)
        return (MediaPart(item),)


PROCESSORS = {"Nose": _ScentProcessor.open}

SCENT = Kind(
    MediaInput(
        name="scent",
        noun="smell",
        plural="smells",
        left_out="[A smell stood here. The model that answers now has no nose.]",
        limits=MediaLimits(2, FileLimits(100, seconds=8.0)),
        bounds={"seconds": "of one smell"},
        url_part="scent_url",
        block="scent",
        media_types="^smell/",
    ),
    part="scent_config",
    section="scent_processor",
    old_file="scent_config.json",
    type_key="scent_processor_type",
    table=f"{__name__}:PROCESSORS",
)


class _Nose(MediaEncoder):
    """A row of the smell's byte for each moment."""

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return shape[0]

    def rows(self, shape: tuple[int, ...]) -> int:
        return shape[0]

    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        rng = np.random.default_rng(0)
        values = mx.array(rng.standard_normal((256, 256), dtype=np.float32))
        return (values[features],)


def _smelling_model(folder: Path) -> Path:
    """Return the embedded model, whose files speak of smells."""
    shutil.copytree(MODEL_DIR, folder)
    said: dict[str, dict[str, Any]] = {
        "config.json": {"scent_config": {}, "scent_token_id": _PLACEHOLDER},
        "processor_config.json": {"scent_processor": {"scent_processor_type": "Nose"}},
    }
    for name, values in said.items():
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    template = (folder / "chat_template.jinja").read_text()
    mark = Tokenizer.open(MODEL_DIR).token_text(_PLACEHOLDER)
    assert mark is not None
    assert "'audio'" in template
    (folder / "chat_template.jinja").write_text(template.replace("'audio'", "'scent'"))
    return folder


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return open_model(str(MODEL_DIR), dtype="float32")


def test_a_kind_of_media(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: LoadedModel
) -> None:
    """A new kind of media goes from two protocols to the rows of its encoder, within its limits."""
    monkeypatch.setitem(KINDS, "scent", SCENT)
    options = with_media_limits(MediaOptions)(max_scent_seconds="5")
    config = ServerConfig(**options.media_settings())

    def coded(smell: bytes) -> str:
        return base64.b64encode(smell).decode()

    def chat(*smells: bytes) -> dict[str, Any]:
        urls = [{"url": f"data:smell/raw;base64,{coded(smell)}"} for smell in smells]
        parts = [{"type": "scent_url", "scent_url": url} for url in urls]
        return {"model": "quire-demo", "messages": [{"role": "user", "content": parts}]}

    with ExitStack() as stack:
        served = start(stack, Tokenizer.open(MODEL_DIR), config, _smelling_model(tmp_path / "m"))

        def ask(path: str, body: dict[str, Any]) -> Any:
            return HTTP.post(f"{served.url}/v1/{path}", json=body)

        deaf = ask("chat/completions", chat(b"rose"))
        assert "'scent_url', which the model that is served does not take" in deaf.text
    with ExitStack() as stack:
        served = start(stack, Tokenizer.open(MODEL_DIR), config, tmp_path / "m", ("text", "scent"))
        too_long, too_many = ask("chat/completions", chat(b"cheese")), chat(b"a", b"b", b"c")
        assert too_long.json()["error"]["code"] == "media_too_large"
        assert "3 smells; at most 2" in ask("chat/completions", too_many).text
        source = {"type": "base64", "media_type": "smell/raw", "data": coded(b"rose")}
        block = {"role": "user", "content": [{"type": "scent", "source": source}]}
        for smell in (b"rose", b"fish"):
            answer = ask("chat/completions", chat(smell))
            assert answer.status_code == 200, answer.text
        asked = {"model": "quire-demo", "max_tokens": 4, "messages": [block]}
        answer = ask("messages", asked)
        assert answer.status_code == 200, answer.text
        requests = list(served.engine.requests)
    monkeypatch.setattr(type(demo.model), "encoders", {"scent": _Nose()})
    rose, fish, again = (
        Company(demo, EngineConfig(model="", kv_memory=8 << 20)).run(
            [replace(request, id="a", max_tokens=4, sampling=SamplingParams(temperature=0))]
        )["a"]
        for request in requests
    )
    assert rose.tokens == again.tokens
    first = min(rose.logits)
    assert not mx.allclose(rose.logits[first], fish.logits[first])

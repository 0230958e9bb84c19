"""`quire eval-kv` on the embedded model: bars that hold, and faults that it must see."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from quire.cache.formats.page import PageStore
from quire.cache.formats.registry import SCHEMES
from quire.cli import main
from quire.cli.kv_quality import bits_an_element, teacher_forced
from quire.cli.kv_scores import Score
from quire.cli.kv_texts import conversation
from quire.core.errors import ModelError
from quire.core.kv_format import KVFormat
from quire.demo import MODEL_DIR
from quire.models.base import named_parameters
from quire.models.weights.loader import LoadedModel, open_model
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tests.support.families import CONFIGS as FAMILY_CONFIGS
from tests.support.tiny_models import write_model


def evaluate(out: Path, *more: str) -> int:
    """Runs the command on little, and gives its exit status."""
    little = ["--tokens", "800", "--needles", "none", "--prompts", "2", "--as-served"]
    formats = ["--formats", "page-8,page-4,uniform-8-g64"]
    return main(["eval-kv", *little, *formats, "--json", str(out), *more])


@pytest.mark.slow
def test_bars_hold_and_figures_are_written(tmp_path: Path) -> None:
    out, plot = tmp_path / "kv.json", tmp_path / "kv.svg"
    assert evaluate(out, "--plot", str(plot)) == 0
    scores = {score["format"]: score for score in json.loads(out.read_text())}
    assert (scores["plain"]["kl_mean"], scores["plain"]["greedy"]) == (0, 1)
    assert 8.3 < scores["page-8"]["bits"] < 16
    assert 0 < scores["page-8"]["kl_mean"] < scores["page-4"]["kl_mean"]
    assert plot.read_text().count("<circle") == 3


class KeysOffByOne(PageStore):
    """Keys coded one position too late."""

    def _code(self, vectors: list[mx.array], rows: mx.array) -> None:
        keys, *values = vectors
        super()._code([mx.roll(keys, 1, 1), *values], rows)


class ScalesSwapped(PageStore):
    """The scales of neighbouring channels change places."""

    def _code(self, vectors: list[mx.array], rows: mx.array) -> None:
        super()._code(vectors, rows)
        scales = self._keys[1]
        self._keys[1] = scales.reshape(scales.shape[0], -1, 2)[..., ::-1].reshape(scales.shape)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [KeysOffByOne, ScalesSwapped])
def test_planted_faults_fail_the_command(
    fault: type[PageStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(SCHEMES, "page", fault)
    assert evaluate(tmp_path / "kv.json") == 1
    assert "missed: page-8 (near-lossless)" in capsys.readouterr().err


def with_outliers(folder: str, factor: float) -> LoadedModel:
    """Return the model with two key channels of each head grown, and their queries shrunk to match.

    Keys are normed, then rotated: a channel's partner in its rotation grows with it. The scales lie
    in `q_norm` and `k_norm`, which hold for all heads of a layer.
    """
    loaded = open_model(folder)
    weights = {}
    for name, array in named_parameters(loaded.model).items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            half = array.shape[0] // 2
            scale = [1.0] * (2 * half)
            grow = factor if name.endswith("k_norm.weight") else 1 / factor
            scale[3] = scale[3 + half] = grow
            weights[name] = array * mx.array(scale, dtype=array.dtype)
    loaded.model.load_weights(list(weights.items()), strict=False)
    return loaded


@pytest.mark.slow
def test_outlier_channels_do_not_move_page_4() -> None:
    loaded = open_model(str(MODEL_DIR))
    tokenizer = Tokenizer.open(MODEL_DIR)
    template = ChatTemplate.open(MODEL_DIR, tokenizer.special_tokens)
    # The perplexity of one conversation moves by 1.3% either way, so a bar of 1% wants many.
    texts = [conversation(tokenizer, template, 512, seed) for seed in range(16)]
    formats = [KVFormat("page", 4, 4), KVFormat("uniform", 4, 4, 64)]
    usual, grown = ([Score(f.name, 4.5) for f in formats] for _ in range(2))
    teacher_forced(loaded, formats, texts, usual)
    teacher_forced(with_outliers(str(MODEL_DIR), 20.0), formats, texts, grown)
    assert grown[0].plain_perplexity == pytest.approx(usual[0].plain_perplexity, rel=1e-4)
    assert grown[0].misses(grown[0]) == []
    assert grown[0].kl_mean == pytest.approx(usual[0].kl_mean, rel=0.3)
    for before, after in zip(usual, grown, strict=True):
        ratio = after.perplexity / after.plain_perplexity
        print(f"{after.format}: mean KL {before.kl_mean:.5f} -> {after.kl_mean:.5f}, {ratio=:.4f}")


def test_a_model_of_states_alone_has_no_formats_to_compare(tmp_path: Path) -> None:
    loaded = open_model(str(write_model(tmp_path, FAMILY_CONFIGS["mamba2"])))
    with pytest.raises(ModelError, match="has no KV cache"):
        bits_an_element(loaded, KVFormat("page", 4, 4))

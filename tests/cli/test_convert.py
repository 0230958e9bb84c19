"""`quire convert` on the embedded model: the copy, and what is said of its quality."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.demo import MODEL_DIR, NAME
from tests.support.tiny_models import CONFIGS, write_model

TEXT = "The baker found the red clock near the river. The code of Anna is 48213. " * 3


def convert(model: str, folder: Path, *more: str) -> dict[str, Any]:
    """Runs the command on a short text, and gives its figures."""
    text, report = folder / "text", folder / "report.json"
    text.write_text(TEXT)
    measure = ["--tokens", "40", "--text", str(text), "--json", str(report)]
    assert main(["convert", model, str(folder / "out"), *measure, *more]) == 0
    figures: dict[str, Any] = json.loads(report.read_text())
    return figures


def test_the_copy_is_measured_beside_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_model(tmp_path / "plain", CONFIGS["qwen3"](vocab_size=3072))
    for path in MODEL_DIR.glob("*token*.json"):
        shutil.copy(path, plain)
    figures = convert(str(plain), tmp_path, "--mode", "mxfp4", "--layers", "embeddings=8")
    assert figures["quality"]["judged"] == 39
    assert figures["quality"]["kl_mean"] > 0
    told = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (told["mode"], told["model.embed_tokens"]["bits"]) == ("mxfp4", 8)
    assert f"mean {figures['quality']['kl_mean']:.6f}" in capsys.readouterr().out
    assert main(["convert", str(plain), str(tmp_path / "out")]) == 1
    assert "exists and is not an empty folder" in capsys.readouterr().err


@pytest.mark.slow
def test_more_bits_are_nearer_to_the_embedded_model(tmp_path: Path) -> None:
    scores = []
    for bits in ("3", "4", "8"):
        (tmp_path / bits).mkdir()
        scores.append(convert(NAME, tmp_path / bits, "--bits", bits)["quality"])
    assert [score["kl_mean"] for score in scores] == sorted(
        (score["kl_mean"] for score in scores), reverse=True
    )
    assert scores[-1]["kl_mean"] < 0.01
    assert scores[-1]["top1"] > 0.95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "head"], "--layers: 'head' is not LAYERS=BITS"),
        (["--layers", "head=7"], "with one of 2, 3, 4, 5, 6, 8, mxfp4, nvfp4, mxfp8, plain"),
        (["--mode", "mxfp4", "--bits", "8"], "--bits 8: mxfp4 has 4 bits"),
        (["--layers", "*.nowhere=8"], "no matrix of the model is covered by '*.nowhere'"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", NAME, str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

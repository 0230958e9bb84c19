"""Scripts that compare Quire with peers, run as users run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from quire.demo import MODEL_DIR
from quire.models.weights.loader import open_model
from tests.models.solo import solo_logits

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROMPT = [2, *((7 * i * i + 3 * i) % 3000 for i in range(40))]


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_fewer_steps_than_a_turn_are_timed() -> None:
    done = _run("kv_formats.py", "--formats", "plain", "--context", "16", "--rounds", "4")
    assert done.returncode == 0, done.stderr
    assert "| plain |" in done.stdout


@pytest.mark.parametrize("script", ["kv_formats.py --rounds 2", "cpu.py --format-rounds 2"])
def test_too_few_steps_are_refused(script: str) -> None:
    if script.startswith("cpu.py"):
        script += " --peers-python python"
    done = _run(*script.split())
    assert done.returncode == 2
    assert "'2' is not a number of at least 3" in done.stderr


@pytest.fixture(scope="module")
def without_hearing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "demo"
    done = _run("make_demo_model.py", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def test_the_embedded_model_for_peers_writes_the_same(without_hearing: Path) -> None:
    ours, embedded = open_model(str(without_hearing)), open_model(str(MODEL_DIR))
    assert mx.array_equal(solo_logits(ours.model, PROMPT), solo_logits(embedded.model, PROMPT))


@pytest.mark.oracle
def test_mlx_lm_loads_the_embedded_model_for_peers(without_hearing: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    theirs, _ = utils.load_model(without_hearing)
    expected = theirs(mx.array([PROMPT]))[0].astype(mx.float32)
    logits = solo_logits(open_model(str(without_hearing)).model, PROMPT)
    assert mx.abs(logits - expected).max().item() < 0.05 * mx.abs(expected).max().item()

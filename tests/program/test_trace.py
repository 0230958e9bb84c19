"""Programs as text, held against golden files: what a model computes, seen at a glance.

Run `python -m tests.program.test_trace` to write the files anew, and read what changed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx
import pytest

from quire.device.device import open_device
from quire.models.base import named_parameters
from quire.program.trace import NotLinear, trace
from quire.program.values import Form
from tests.program.programs import opened

GOLDEN = Path(__file__).parent / "golden"
NAMES = """
    llama qwen3_moe gemma4 gemma4_moe gemma4_ple gpt_oss qwen3_5_moe deepseek_v3 granitemoehybrid
    mamba2 lfm2 kimi_linear
"""


def _text(name: str, folder: Path) -> str:
    programs = trace(opened(name, folder).model)
    return f"{programs.body}\n{programs.head}\n"


@pytest.mark.parametrize("name", NAMES.split())
def test_a_program_reads_as_before(name: str, tmp_path: Path) -> None:
    open_device("auto")
    assert _text(name, tmp_path) == (GOLDEN / f"{name}.txt").read_text()


def test_tracing_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = opened("gemma4_moe", tmp_path).model
    before = named_parameters(model)
    trace(model)
    after = named_parameters(model)
    assert before.keys() == after.keys()
    assert all(after[name] is array for name, array in before.items())


def test_code_that_depends_on_the_rows_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened("llama", tmp_path).model
    monkeypatch.setattr(
        type(model), "logits", lambda self, hidden: hidden * mx.array(float(len(hidden)))
    )
    with pytest.raises(NotLinear, match="constant"):
        trace(model)


def test_a_form_is_a_linear_function_of_the_sizes() -> None:
    form = Form(3, (("T", 2), ("R", 1)))
    assert form.at({"T": 5, "R": 4}) == 17
    assert str(form) == "2*T+R+3"


if __name__ == "__main__":
    open_device("auto")
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        for each in NAMES.split():
            (GOLDEN / f"{each}.txt").write_text(_text(each, Path(made)))

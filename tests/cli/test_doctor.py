"""`quire doctor` on this machine."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from quire.attention import registry
from quire.attention.backend import Backends
from quire.attention.paged import PortableBackend
from quire.attention.paged.target import METAL
from quire.attention.reference import ReferenceBackend
from quire.cli import main
from quire.demo import MODEL_DIR, NAME
from quire.device.cpu import kernels
from quire.device.cpu.cores import Cores
from quire.device.device import CPU, current_device
from quire.device.gpu_kernels import Kernel
from tests.support.gguf_files import write_gguf
from tests.support.served import FAMILIES
from tests.support.tiny_models import tiny_model


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """Return the exit status, and each finding as `state: text`."""
    status = main(["doctor", "--json", *arguments])
    findings = json.loads(capsys.readouterr().out)
    return status, {each["what"]: f"{each['state']}: {each['text']}" for each in findings}


def test_a_machine_that_serves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, found = doctor(capsys, "--kv-disk", str(tmp_path / "new"), "--kv-disk-size", "1KB")
    assert status == 0
    assert found["model"].startswith("ok: gemma4")
    assert current_device().name in found["device"]
    assert found["attention"].endswith("MLX's operations")
    assert found["disk tier"].startswith("ok")
    assert not (tmp_path / "new").exists()


def test_attention_kernels_that_give_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*arguments: object) -> Kernel:
        raise RuntimeError("no such language")

    backend = PortableBackend(replace(METAL, compile=no_compiler), [mx.float32])
    backend.name = "told by the doctor"  # what was found is kept by name
    backends = Backends([backend, ReferenceBackend()])
    monkeypatch.setattr(registry, "open_backends", lambda: backends)
    status, found = doctor(capsys)
    assert status == 0
    said = "note: told by the doctor (off: no such language), then MLX's operations"
    assert found["attention"] == said


@pytest.mark.skipif(not isinstance(current_device(), CPU), reason="the CPU's kernels")
def test_why_there_are_no_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a process that has not loaded them.
    monkeypatch.setattr(kernels, "_extension", kernels._extension.__wrapped__)
    monkeypatch.setattr(kernels, "version", lambda name: "0.0.0")
    if not kernels.TARGET.exists():
        assert "were not built" in doctor(capsys)[1]["kernels"]
    else:
        assert "this is 0.0.0" in doctor(capsys)[1]["kernels"]


@pytest.mark.skipif(not isinstance(current_device(), CPU), reason="the CPU's kernels")
def test_instructions_and_threads_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels.TARGET.exists():
        pytest.skip("no kernels were built")
    try:
        set_here = doctor(capsys, "--threads", "1", "--kernels", "native")[1]["kernels"]
        assert "1 thread (as set); usable here: " in set_here
        monkeypatch.setattr(kernels, "usable_cores", lambda: Cores(3, "all cores"))
        assert "3 threads (all cores)" in doctor(capsys)[1]["kernels"]
        monkeypatch.setenv("QUIRE_ACTIVATION_BITS", "8")
        assert ", activations of 8 bits, 3 threads" in doctor(capsys)[1]["kernels"]
        monkeypatch.setenv("QUIRE_KERNELS", "neon" if platform.machine() == "x86_64" else "avx2")
        status, found = doctor(capsys)
        assert status == 1
        assert (
            "neon is not available on this processor or in this build; available:"
            in found["kernels"]
            or "avx2 is not available on this processor or in this build; available:"
            in found["kernels"]
        )
        monkeypatch.setenv("QUIRE_KERNELS", "off")
        assert "switched off" in doctor(capsys)[1]["kernels"]
    finally:
        monkeypatch.undo()
        current_device().choose_products("auto", threads=1)
        current_device().choose_products("mlx")


def test_what_is_wrong_with_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert doctor(capsys, str(tmp_path / "none"))[0] == 1
    shutil.copy(MODEL_DIR / "config.json", tmp_path)
    status, found = doctor(capsys, str(tmp_path))
    assert status == 1
    assert found["model"].startswith("wrong: ")
    encoder = tmp_path / "mmproj-F16.gguf"
    encoder.touch()
    told = doctor(capsys, str(encoder))[1]["model"]
    assert told.startswith(f"wrong: {encoder}: this is an encoder of images")


def test_the_embedded_model_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys, NAME)[1]["model"].startswith("ok: gemma4")


def test_a_model_of_the_hub_cache_by_its_id(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, commit = tmp_path / "models--owner--name", 40 * "a"
    shutil.copytree(MODEL_DIR, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    assert doctor(capsys, "owner/name")[1]["model"].startswith("ok: gemma4")
    status, found = doctor(capsys, "owner/other")
    assert status == 1
    assert found["model"].startswith("wrong: owner/other: not on this disk")
    assert "no model is called 'name'" in doctor(capsys, "name")[1]["model"]


def test_a_gguf_file_is_looked_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_gguf(tiny_model(tmp_path / "source", "llama"), tmp_path / "tiny.gguf")
    assert doctor(capsys, str(tmp_path / "tiny.gguf"))[1]["model"].startswith("ok: llama")


def test_a_disk_tier_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, found = doctor(capsys, "--kv-disk", str(tmp_path / "file"))
    assert status == 1
    assert "is not a folder" in found["disk tier"]
    assert doctor(capsys, "--kv-disk", str(tmp_path), "--kv-disk-size", "9000TB")[0] == 0


def test_the_program_of_a_model_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--program"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "program of T"
    assert sum("attend(" in line for line in lines) == 8  # the embedded model's layers
    assert "program of R" in lines  # the head


def test_the_programs_of_encoders_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = FAMILIES["qwen3_omni_moe"].write(tmp_path / "model")
    assert main(["doctor", "--program", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = {"image": "N", "audio": "one item", "video": "one item"}
    for kind, symbols in starts.items():
        (first,) = (n for n, line in enumerate(lines) if line.startswith(f"encoder of {kind} "))
        assert lines[first + 1] == f"program of {symbols}"
    assert sum("attend_groups(" in line for line in lines) > 3

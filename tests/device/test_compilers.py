"""No request on a CPU waits for a compiler: MLX's is `g++`, and takes seconds for each kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.core.request import SamplingParams
from quire.models.weights.loader import open_model
from tests.support.parity import Company, prompts
from tests.support.tiny_models import CONFIGS, tiny_model

ROOT = Path(__file__).parents[2]
FORMATS = ("plain", "plain-float16", "page-8", "page-3/2", "uniform-6", "turbo-4", "turbo-3.5")
SAMPLING = (
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(temperature=0.8, top_k=5, min_p=0.1, seed=2, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=3, logit_bias=((7, 2.0),), presence_penalty=0.5),
)

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="compilers of GPUs are MLX's")


def run_requests(folder: Path) -> None:
    """Run requests of every family and scheme, in chunks and together, with each way of
    sampling.
    """
    for family in CONFIGS:
        path = tiny_model(folder / family, family)
        loaded = open_model(str(path), dtype="float32")
        for name in FORMATS if family == "llama" else ("plain", "page-4"):
            config = EngineConfig(
                str(path), kv_memory=32 << 20, kv_format=parse_format(name), max_step_tokens=48
            )
            company = Company(loaded, config)
            requests = zip(prompts((1, 70, 90, 5), tokens=3), SAMPLING, strict=True)
            company.run([replace(each, sampling=way) for each, way in requests], every=1)
            assert all(answer.tokens for answer in company.answers.values())


def compilers_called(tmp_path: Path, code: str) -> int:
    """Return how often a new process that runs `code` calls g++; nothing is cached from before."""
    calls = tmp_path / "calls"
    calls.touch()
    wrapper = tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {shutil.which("g++")} "$@"\n')
    wrapper.chmod(0o755)
    home = str(tmp_path / "home")
    Path(home).mkdir()
    fresh = {"TMPDIR": home, "HOME": home, "XDG_CACHE_HOME": home}
    path = f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}"
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | fresh | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    # MLX also asks for the version, to know whether there is a compiler.
    return sum("-shared" in line for line in calls.read_text().splitlines())


def test_no_request_waits_for_a_compiler(tmp_path: Path) -> None:
    module = "tests.device.test_compilers"
    code = f"import sys, pathlib, {module} as t; t.run_requests(pathlib.Path(sys.argv[1]))"
    assert compilers_called(tmp_path, code) == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler to be called")
def test_a_compiler_would_be_seen(tmp_path: Path) -> None:
    code = "import mlx.core as mx; mx.eval(mx.compile(lambda x: mx.exp(x) + x)(mx.ones(3)))"
    assert compilers_called(tmp_path, code) == 1

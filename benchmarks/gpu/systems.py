"""Quire's engine, vLLM and mlx-lm behind one interface, each opened in a process of its own.

Modules of a system are imported when it is opened: no process needs them all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from loads import AROUND, PICTURE, Answered, Asked, Row, System

NOTES = {
    "quire": ["the head, embeddings and routers of models in 4 bits are in 4 bits, too"],
    "vllm": [
        "weights are drawn at random in AWQ's layout; Quire's are random codes of MLX's",
        "head, embeddings and routers stay in bfloat16, as in published AWQ models",
        "the engine runs in the measuring process, as Quire's does",
        "transformers cuts pictures within its time; Quire's server does so in other processes, "
        "which is not counted",
    ],
    "mlx-lm": ["BatchGenerator, which caches no prompts between requests"],
    "llama.cpp": [
        "llama-batched-bench: all prompts are read before a stream generates",
        "weights in Q4_0; beside experts in MXFP4 in Q8_0, where the others have bfloat16",
        "its first tokens are those of all prompts together",
    ],
}
"""Notes by system: reasons other than speed why its figures differ from others'."""


def picture(seed: int) -> Any:
    """Return a random picture of `PICTURE` pixels, which no cache knows."""
    from PIL import Image

    width, height = PICTURE
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    return Image.fromarray(coarse).resize(PICTURE)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # it runs from its sources
        return "sources"


def open_vllm(folder: Path, kv_gigabytes: int, most_streams: int) -> System:
    """Open vLLM; its module needs vLLM when it is used, not when it is imported."""
    from vllm_system import VLLM

    return VLLM(folder, kv_gigabytes, most_streams)


class Quire:
    """Quire's engine."""

    caches_prefixes = True

    def __init__(
        self, folder: Path, kv_gigabytes: int, most_streams: int, kv_format: str = "plain"
    ) -> None:
        os.environ.setdefault("MLX_ENABLE_TF32", "0")  # as `quire serve` sets for its engine
        os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
        import mlx.core as mx

        from quire.core.config import EngineConfig
        from quire.core.kv_choice import parse_format
        from quire.core.processes import freeze_heap
        from quire.engine.factory import open_engine
        from quire.media.processors.gemma4 import Cutter

        config = EngineConfig(
            str(folder),
            kv_memory=kv_gigabytes << 30,
            max_sequences=max(64, most_streams),
            speculate="off",  # random weights repeat themselves
            kv_format=parse_format(kv_format),
        )
        self._engine = open_engine(config)
        freeze_heap()  # as the engine's process does
        own = json.loads((folder / "config.json").read_text())
        self.sees = "vision_config" in own
        self._marks = [own.get(f"{name}_token_id", 0) for name in ("boi", "image", "eoi")]
        self._cutter = Cutter(patch=16, pooling=3, max_soft_tokens=280)
        device = mx.device_info().get("device_name", "cpu")
        self.about: Row = {"version": _version("quire"), "mlx": mx.__version__, "device": device}

    def prepare(self, asked: Asked) -> Any:
        from quire.core.media import PlacedMedia
        from quire.core.request import Request, SamplingParams

        prompt, media = asked.prompt, ()
        if asked.picture is not None:
            item = self._cutter.item("image", picture(asked.picture), "", "auto")
            start, placeholder, end = self._marks
            media = (PlacedMedia(AROUND + 1, item),)
            rows = (start, *item.tokens * (placeholder,), end)
            prompt = (*prompt[:AROUND], *rows, *prompt[AROUND:])
        greedy = SamplingParams(temperature=0.0)
        return Request(asked.name, prompt, greedy, asked.max_tokens, media=media)

    def add(self, prepared: Any) -> None:
        self._engine.add(prepared)

    def step(self) -> list[Answered]:
        found = []
        for each in self._engine.step():
            if each.error is not None:
                raise SystemExit(f"{each.request_id}: {each.error.message}")
            found.append(Answered(each.request_id, each.token_ids, each.finish is not None))
        return found


class MLXLM:
    """mlx-lm's BatchGenerator, which reads what is added when earlier prompts are read."""

    caches_prefixes = sees = False

    def __init__(self, folder: Path, kv_gigabytes: int, most_streams: int) -> None:
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.utils import load_model

        model, _ = load_model(folder)
        mx.eval(model.parameters())
        self._generator = BatchGenerator(
            model, completion_batch_size=most_streams, prefill_batch_size=most_streams
        )
        self._names: dict[int, str] = {}
        self.about: Row = {"version": _version("mlx-lm"), "mlx": mx.__version__}

    def prepare(self, asked: Asked) -> Any:
        return asked

    def add(self, prepared: Any) -> None:
        asked: Asked = prepared
        (own,) = self._generator.insert([list(asked.prompt)], [asked.max_tokens])
        self._names[own] = asked.name

    def step(self) -> list[Answered]:
        _, responses = self._generator.next()
        return [
            Answered(self._names[each.uid], [each.token], each.finish_reason is not None)
            for each in responses
        ]


SYSTEMS: dict[str, Callable[[Path, int, int], System]] = {
    "quire": Quire,
    "vllm": open_vllm,
    "mlx-lm": MLXLM,
}

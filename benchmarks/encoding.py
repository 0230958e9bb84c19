"""Measures waits of streams while media is encoded: two trees of Quire in alternating rounds.

    python benchmarks/encoding.py OLD NEW [--rounds 3] [--out RESULTS.json]

OLD and NEW are trees; the interpreter that runs this serves both. The engine runs in the process,
without HTTP, on OpenBLAS. Four streams generate; then a picture or video comes whose encoder takes
seconds. What is measured is the longest time between two tokens of a stream from then on, the
median one, and how long the first token of the answer about the media took. The model is random: an
encoder of Qwen2-VL with 12 layers of width 384, before a small decoder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "text_config": {
        "model_type": "qwen2_vl_text",
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [8, 12, 12],
        },
    },
    "vision_config": {
        "depth": 12,
        "num_heads": 6,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "embed_dim": 384,
        "hidden_size": 256,
        "mlp_ratio": 4,
    },
    "image_token_id": 255,
    "video_token_id": 252,
    "vision_start_token_id": 254,
    "vision_end_token_id": 253,
    "tie_word_embeddings": False,
}
SHAPES = {"image": (32, 32), "video": (12, 16, 16, 1_000_000)}
"""Patches of the picture; moments of the video, its patches, and microseconds a moment."""
STREAMS, WARM_TOKENS, MOST_TOKENS = 4, 30, 4000
Figures = dict[str, dict[str, float]]


def measure(folder: Path) -> Figures:
    """Return milliseconds by kind of media, measured in the process that serves."""
    from quire.core.config import EngineConfig
    from quire.core.media import MediaItem, PlacedMedia
    from quire.core.request import Request, SamplingParams
    from quire.engine.factory import open_engine

    engine = open_engine(
        EngineConfig(str(folder), prefix_cache=False, kv_memory=256 << 20, blas="openblas")
    )

    def asked(name: str, tokens: int, kind: str = "", seed: int = 0) -> Request:
        prompt: tuple[int, ...] = tuple(range(3, 13))
        media: tuple[PlacedMedia, ...] = ()
        if kind:
            encoder, shape = engine._loaded.model.encoders[kind], SHAPES[kind]
            features = bytes([seed]) * encoder.feature_bytes(shape)
            rows = encoder.rows(shape)
            item = MediaItem.of(kind, features, shape, rows, bidirectional=False)
            media = (PlacedMedia(len(prompt), item),)
            prompt = (*prompt, *([255 if kind == "image" else 252] * rows), 5)
        greedy = SamplingParams(temperature=0)
        return Request(name, prompt, greedy, tokens, media=media)

    figures: Figures = {}
    for number, kind in enumerate(["image", "video", "image", "video"]):  # twice: costs are learned
        name = f"{kind}{number}"
        streams = {f"{name}-{n}" for n in range(STREAMS)}
        for each in streams:
            engine.add(asked(each, MOST_TOKENS))
        counts, last, gaps = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0.0), []
        started = first = 0.0
        while not first:
            if not started and min(counts.values()) >= WARM_TOKENS:
                engine.add(asked(name, 4, kind, number + 1))
                started = time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id == name and output.token_ids:
                    first = now
                elif output.request_id in streams and output.token_ids:
                    if started:
                        gaps.append(now - last[output.request_id])
                    last[output.request_id] = now
                    counts[output.request_id] += len(output.token_ids)
        for each in (*streams, name):
            engine.abort(each)
        while engine.has_work:
            engine.step()
        figures[kind] = {
            "longest gap": 1e3 * max(gaps),
            "median gap": 1e3 * statistics.median(gaps),
            "first token": 1e3 * (first - started),
        }
    return figures


def write_model(folder: Path) -> None:
    """A random model."""
    from quire.models.base import named_parameters
    from quire.models.registry import build

    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = {
        name: mx.ones(place.shape)
        if place.ndim == 1
        else mx.random.normal(place.shape) * place.shape[-1] ** -0.5
        for name, place in named_parameters(build(CONFIG)).items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def main() -> None:
    """Measures, prints a table, and writes the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.trees[0])))
        return
    rounds: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for _ in range(args.rounds):
            found = {}
            for name, tree in zip(("before", "after"), args.trees, strict=True):
                command = [sys.executable, __file__, folder, "--measure"]
                environment = os.environ | {"PYTHONPATH": str(tree.resolve() / "src")}
                said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
                found[name] = json.loads(said.stdout.splitlines()[-1])
            rounds.append(found)
            print(json.dumps(found), file=sys.stderr)
    if args.out is not None:
        args.out.write_text(json.dumps({"rounds": rounds}, indent=1) + "\n")
    print("| | " + " | ".join(f"{kind}, {each} ms" for kind in SHAPES for each in _COLUMNS) + " |")
    print("| --- |" + " ---: |" * len(SHAPES) * len(_COLUMNS))
    for name in ("before", "after"):
        medians = (
            statistics.median(each[name][kind][column] for each in rounds)
            for kind in SHAPES
            for column in _COLUMNS
        )
        print(f"| {name} | " + " | ".join(f"{value:,.0f}" for value in medians) + " |")


_COLUMNS = ("longest gap", "median gap", "first token")

if __name__ == "__main__":
    main()

"""A draft model on and off, Quire beside mlx-lm, in one run: tokens per second.

    OMP_NUM_THREADS=1 python -m benchmarks.draft_models [--layers 12] [--tokens 96] [--rounds 2]

Both serve a random Llama, drafted for by its own first layer. The other layers add next to nothing,
so about every draft is right, and what is measured is the cost of drafting and verifying. mlx-lm
drafts for one stream only; its number of drafts is `--drafts`. Quire chooses its own number, at
most eight. Greedy answers with and without drafts must be equal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.engine.engine import Engine
from quire.engine.factory import open_engine

_HIDDEN, _WIDTH, _HEADS, _HEAD_DIM, _VOCAB = 512, 1024, 8, 64, 2048
_QUIET = 0.02
"""Factor of what the layers behind the first add."""
_PROMPT = 48


def write(folder: Path, layers: int) -> Path:
    """Write a random Llama of so many layers; the first is the same in each."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    dice = np.random.default_rng(0)

    def matrix(rows: int, columns: int, scale: float = 1.5) -> mx.array:
        return mx.array(dice.normal(size=(rows, columns)) * scale * columns**-0.5, mx.float32)

    weights = {
        "model.embed_tokens.weight": matrix(_VOCAB, _HIDDEN),
        "lm_head.weight": matrix(_VOCAB, _HIDDEN),
        "model.norm.weight": mx.ones(_HIDDEN),
    }
    inner = _HEADS * _HEAD_DIM
    for number in range(layers):
        layer, adds = f"model.layers.{number}.", 1.5 if number == 0 else 1.5 * _QUIET
        weights |= {f"{layer}self_attn.{n}_proj.weight": matrix(inner, _HIDDEN) for n in "qkv"}
        weights[f"{layer}self_attn.o_proj.weight"] = matrix(_HIDDEN, inner, adds)
        weights |= {f"{layer}mlp.{n}_proj.weight": matrix(_WIDTH, _HIDDEN) for n in ("gate", "up")}
        weights[f"{layer}mlp.down_proj.weight"] = matrix(_HIDDEN, _WIDTH, adds)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{norm}.weight"] = mx.ones(_HIDDEN)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _prompts(count: int) -> list[tuple[int, ...]]:
    dice = np.random.default_rng(1)
    return [tuple(dice.integers(0, _VOCAB, _PROMPT).tolist()) for _ in range(count)]


def _quire(engine: Engine, name: str, streams: int, tokens: int, speculation: str) -> Any:
    """Serve so many streams; return their answers."""
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(_prompts(streams)):
        own = f"{name} {number}"
        answers[own] = []
        sampling = SamplingParams(temperature=0)
        engine.add(
            Request(own, prompt, sampling, tokens, speculation=speculation, cache_salt=name)  # type: ignore[arg-type]
        )
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.flush()
    return [tuple(each) for each in answers.values()]


def _mlx_lm(model: Any, draft: Any, drafts: int, tokens: int) -> Any:
    from mlx_lm.generate import generate_step, speculative_generate_step

    prompt = mx.array(_prompts(1)[0])
    if drafts:
        steps = speculative_generate_step(
            prompt, model, draft, num_draft_tokens=drafts, max_tokens=tokens
        )
    else:
        steps = generate_step(prompt, model, max_tokens=tokens)
    return [tuple(int(step[0]) for step in steps)]


def _show(title: str, ways: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Run ways in turns; print the best tokens per second of processor time of each."""
    best: dict[str, float] = {}
    first: Any = None
    for _ in range(rounds):
        for way, run in ways.items():
            started = time.process_time()
            answers = run()
            rate = sum(map(len, answers)) / (time.process_time() - started)
            best[way] = max(best.get(way, 0.0), rate)
            first = first or answers
            assert answers == first, f"{title}, {way}: another answer"
    base = next(iter(best.values()))
    shown = "   ".join(f"{way} {rate:.0f} tok/s ({rate / base:.2f})" for way, rate in best.items())
    print(f"{title}: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=4, help="of mlx-lm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write(Path(folder) / "model", options.layers)
        draft = write(Path(folder) / "draft", 1)
        config = EngineConfig(
            str(model), kv_memory=256 << 20, threads=1, draft_model=str(draft), speculate="off"
        )
        engine = open_engine(config)
        number = 0

        def served(streams: int, way: str) -> Any:
            nonlocal number
            number += 1
            return _quire(engine, f"{number} {way}", streams, options.tokens, way)

        for streams in (1, 8):
            _show(
                f"quire, {streams} streams",
                {
                    "off": lambda streams=streams: served(streams, "off"),  # type: ignore[misc]
                    "draft": lambda streams=streams: served(streams, "draft"),  # type: ignore[misc]
                },
                options.rounds,
            )
        stats = engine.stats()
        print(f"drafted {dict(stats.drafts)}, accepted {dict(stats.accepted_drafts)}")
        from mlx_lm.utils import load_model

        theirs, small = (load_model(each)[0] for each in (model, draft))
        _show(
            "mlx-lm, 1 stream",
            {
                "off": lambda: _mlx_lm(theirs, small, 0, options.tokens),
                "draft": lambda: _mlx_lm(theirs, small, options.drafts, options.tokens),
            },
            options.rounds,
        )


if __name__ == "__main__":
    main()

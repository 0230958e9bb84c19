"""Prompt lookup on and off, Quire beside llama.cpp's: tokens per second of processor time.

    python -m benchmarks.lookup_peers --peers-python PYTHON [--tokens 96]

PYTHON is an interpreter with llama-cpp-python, whose `LlamaPromptLookupDecoding` guesses ten tokens
after the last two. Both serve a Llama in float32, with one thread and one stream, whose answer is a
cycle of tokens: its head says of each token's embedding what the next one is, and its layers add
next to nothing. So after one round of the cycle every guess is right, as in an edit of a text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

_HIDDEN, _WIDTH, _HEADS, _LAYERS, _VOCAB = 768, 2048, 12, 8, 4096
_CYCLE = 16
"""Tokens after which an answer repeats itself."""
_QUIET = 1e-3
_PROMPT = 64
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Matrices of a layer, and llama.cpp's names of them."""


def _prompts(count: int) -> list[list[int]]:
    dice = Random(1)
    return [[dice.randrange(10, _VOCAB) for _ in range(_PROMPT)] for _ in range(count)]


def write(folder: Path) -> None:
    """Write the model for both."""
    import gguf
    import numpy as np
    from safetensors.numpy import save_file

    dice = np.random.default_rng(0)
    shapes = {"gate": (_WIDTH, _HIDDEN), "up": (_WIDTH, _HIDDEN), "down": (_HIDDEN, _WIDTH)}

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        drawn = dice.normal(size=(rows, columns)) * scale * columns**-0.5
        return drawn.astype(np.float32)

    table, ones = matrix(_VOCAB, _HIDDEN), np.ones(_HIDDEN, np.float32)
    tokens = np.arange(_VOCAB)
    following = tokens - tokens % _CYCLE + (tokens + 1) % _CYCLE
    head = np.zeros_like(table)
    head[following] = table
    weights = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    theirs = {"token_embd": table, "output_norm": ones, "output": head}
    for layer in range(_LAYERS):
        for name, own in _NAMES.items():
            part = name.split(".")[1].split("_")[0]
            scale = _QUIET if part in ("o", "down") else 1.0
            drawn = matrix(*shapes.get(part, (_HIDDEN, _HIDDEN)), scale)
            weights[f"model.layers.{layer}.{name}.weight"] = drawn
            theirs[f"blk.{layer}.{own}"] = drawn
        norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
        for name, own in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = ones
            theirs[f"blk.{layer}.{own}"] = ones
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model" / "model.safetensors"))
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_VOCAB)
    writer.add_tokenizer_model("no_vocab")
    for name, array in theirs.items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rates(
    ways: dict[str, Callable[[list[int], int], list[int]]],
    prompts: list[list[int]],
    tokens: int,
    rounds: int,
) -> dict[str, float]:
    """Run ways in turns; return the best tokens per second of each, prompts left out."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        answers = []
        for way, run in ways.items():
            began = time.process_time()
            for prompt in prompts:
                run(prompt, 1)
            reading = time.process_time() - began
            began = time.process_time()
            answers.append([run(prompt, tokens) for prompt in prompts])
            seconds = time.process_time() - began - reading
            best[way] = max(best.get(way, 0.0), len(prompts) * (tokens - 1) / seconds)
        assert answers[0] == answers[1], "another answer"
    return best


def quire(folder: Path, asked: argparse.Namespace) -> dict[str, float]:
    """Return Quire's rates."""
    time.perf_counter = time.process_time  # for the engine's choices, too
    from quire.core.config import EngineConfig
    from quire.core.request import Request, SamplingParams
    from quire.core.speculation import Speculation
    from quire.engine.factory import open_engine

    config = EngineConfig(str(folder / "model"), kv_memory=256 << 20, threads=1, prefix_cache=False)
    engine = open_engine(config)
    number = 0

    def served(way: Speculation) -> Callable[[list[int], int], list[int]]:
        def run(prompt: list[int], tokens: int) -> list[int]:
            nonlocal number
            number += 1
            sampling = SamplingParams(temperature=0)
            engine.add(
                Request(
                    f"{number}", tuple(prompt), sampling, tokens, stop_on_loop=0, speculation=way
                )
            )
            answer: list[int] = []
            while engine.has_work:
                for output in engine.step():
                    answer += output.token_ids
                engine.flush()
            return answer

        return run

    ways = {"off": served("off"), "lookup": served("ngram")}
    return _rates(ways, _prompts(asked.prompts), asked.tokens, asked.rounds)


def llama_cpp(folder: Path, asked: argparse.Namespace) -> dict[str, float]:
    """Return llama.cpp's rates."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def opened(guesses: bool) -> Callable[[list[int], int], list[int]]:
        drafter = LlamaPromptLookupDecoding() if guesses else None
        llama = Llama(
            str(folder / "model.gguf"),
            n_ctx=1024,
            n_threads=1,
            n_threads_batch=1,
            draft_model=drafter,
            logits_all=guesses,
            verbose=False,
        )

        def run(prompt: list[int], tokens: int) -> list[int]:
            llama.reset()
            answer: list[int] = []
            for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
                answer.append(int(token))
                if len(answer) >= tokens:
                    break
            return answer

        return run

    ways = {"off": opened(guesses=False), "lookup": opened(guesses=True)}
    return _rates(ways, _prompts(asked.prompts), asked.tokens, asked.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=["quire", "llama.cpp"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side is not None:
        side = quire if asked.side == "quire" else llama_cpp
        print(json.dumps(side(asked.folder, asked)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for side, python in (("quire", sys.executable), ("llama.cpp", asked.peers_python)):
            if python is None:
                continue
            command = [python, __file__, *sys.argv[1:], "--side", side, "--folder", folder]
            ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rates = json.loads(ended.stdout.splitlines()[-1])
            off, on = rates["off"], rates["lookup"]
            print(f"{side}: {off:.0f}, with guesses {on:.0f} ({on / off:.2f})", flush=True)


if __name__ == "__main__":
    main()

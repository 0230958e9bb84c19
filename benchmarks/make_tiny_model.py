"""Writes a random model so small that a server which runs it measures itself.

    python benchmarks/make_tiny_model.py OUT [--family llama|qwen3] [--seed 0]

About 0.07M parameters in the ordinary Hugging Face layout, float32, which every server in
`peers.py` loads. Every piece of its vocabulary is plain ASCII, so each generated token becomes text
at once, and the output rows of the special tokens are zero: a greedy answer never draws one, and
so runs to `max_tokens` on every server.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256
HIDDEN = 64
LAYERS = 2
HEADS = 2
KV_HEADS = 1
HEAD_DIM = 32
INTERMEDIATE = 32
CONTEXT = 32768

TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content if message.content is string else '' }}
{%- for call in message.tool_calls or [] -%}
{{ call.function.name }} {{ call.function.arguments | string }}
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

CORPUS = (
    "The server reads many requests at once and answers each as if it were alone.",
    "A page holds the keys and values of some tokens, and a table says where they are.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 20 30 40 50 60 70 80 90 100, and so on.",
    "Jumping quickly, the brown fox vexed a lazy dog by the zoo; why? Because it could!",
    "THE QUICK BROWN FOX JUMPS OVER A LAZY DOG WITH VIM AND ZEAL.",
    'Write "this" (or that) [now] {here} <there> a/b \\ c_d #1 $2 100% ^ & * - + = ~ ` | : @',
)


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE whose pieces are all ASCII."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=[], min_frequency=1
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(f"the corpus gave {tokenizer.get_vocab_size()} pieces, not {VOCAB}")
    return tokenizer


def make_config(family: str) -> dict[str, Any]:
    """Return `config.json` of a Llama or a Qwen3 of this size."""
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "architectures": [names[family]],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "torch_dtype": "float32",
    }


def make_weights(family: str, seed: int) -> dict[str, mx.array]:
    """Return random weights under Hugging Face's names. Special tokens' rows of the head are
    zero.
    """
    mx.random.seed(seed)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    if family == "qwen3":
        norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    head = mx.random.normal((VOCAB, HIDDEN))
    head[: len(SPECIAL)] = 0
    weights = {
        "model.embed_tokens.weight": mx.random.normal((VOCAB, HIDDEN)),
        "model.norm.weight": mx.ones((HIDDEN,)),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            weights[f"{prefix}{name}.weight"] = mx.random.normal((rows, columns)) * columns**-0.5
        for name, size in norms.items():
            weights[f"{prefix}{name}.weight"] = mx.ones((size,))
    return weights


def write_model(folder: Path, family: str = "llama", seed: int = 0) -> int:
    """Writes the folder and returns its number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = make_weights(family, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    eos = SPECIAL.index("<|im_end|>")
    files = {
        "config.json": make_config(family),
        "generation_config.json": {"eos_token_id": eos},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return sum(array.size for array in weights.values())


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=("llama", "qwen3"), default="llama")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{args.out}: {write_model(args.out, args.family, args.seed):,} parameters")


if __name__ == "__main__":
    main()

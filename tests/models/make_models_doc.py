"""Writes docs/models.md from the registry and the oracle tests.

Run it after a family came or changed: `python -m tests.models.make_models_doc`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from quire.models.registry import FAMILIES
from quire.models.weights.gguf.architectures import ARCHITECTURES
from quire.text.dialects import DIALECTS
from tests.support.crossing import CONFIG as CROSSING
from tests.support.encoders import CONFIGS as ENCODERS
from tests.support.families import CONFIGS, HELD_AGAINST_MLX_LM
from tests.support.fused import CONFIG as FUSED
from tests.support.gguf_architectures import GGUF, NOT_FROM_GGUF
from tests.support.hunyuan import CONFIG as HUNYUAN
from tests.support.hybrid import CONFIG as HYBRID
from tests.support.moondream import CONFIG as MOONDREAM
from tests.support.moondream2 import CONFIG as MOONDREAM2
from tests.support.ocr import CONFIGS as OCR
from tests.support.perception import CONFIG as PERCEPTION
from tests.support.seeing import CONFIGS as SEEING
from tests.support.siglip import CONFIGS as SIGLIP
from tests.support.tiled import CONFIGS as TILED
from tests.support.tiny_models import CONFIGS as TINY
from tests.support.whispering import CONFIG as WHISPERING
from tests.text.published import PUBLISHED

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"

INTRODUCTION = """\
# Models

Written by `python -m tests.models.make_models_doc` from the registry; do not edit.

Checkpoints are read as Hugging Face publishes them (float32, float16 or bfloat16 safetensors) and
as mlx-lm and mlx-vlm convert them, plain or packed (affine 2 to 8 bits, mxfp4, mxfp8, nvfp4).
FP8, and NVFP4 with a scale for the whole matrix, stay so in memory, as below. Integers of
compressed-tensors (1 to 8 bits, with zero points or without, also of W8A8, whose activations stay
floats), MXFP4 and MXFP8 become MLX's codes of the same numbers, as do GPTQ (2, 3, 4 and 8 bits) and
AWQ ("gemm"), by whatever library: AutoRound, and modules of other widths (`dynamic`,
`extra_config`), too. Matrices of 1 and 7 bits, in an order of their own (`desc_act`), or whose
columns have factors (NVFP4 with AWQ) are unpacked, and the log says so. BitNet's ternary matrices
become MLX's codes of 2 bits; activations are not rounded to 8. Of multimodal checkpoints what the
table's second column names is served. A setting in `config.json` that a family
does not compute is refused by name.

FP8 weights (E4M3) with a scale per block, group, row or tensor (DeepSeek, compressed-tensors,
ModelOpt, transformers) are stored as one byte per weight and one float32 scale per row and 128
columns (64 or 32 where rows are no multiple). Scales of eight bits are powers of two (E8M0).

| Where | Products |
| --- | --- |
| CUDA graphs | kernels read the codes and multiply them by bfloat16 rows |
| CPU kernels | read the codes and multiply in float32 |
| Apple silicon, CPUs without kernels | weights are decoded when loaded if that fits, see below |

It fits if all weights then take at most three quarters of the memory; else they are decoded for
each product.

NVFP4 of compressed-tensors and ModelOpt keeps its codes on CUDA, with a bfloat16 scale for each 16
columns; elsewhere it is decoded like FP8.

Activations are never rounded to FP8, whatever the checkpoint says: for random rows that adds a
relative error of 0.026 to each product, where bfloat16 has 0.002. FP8 is decoded when loaded in
stacks of experts under one name, in rows of no multiple of 32 columns, and with scales of fewer.

A tokenizer is `tokenizer.json`, or where that is not there, Mistral's `tekken.json`, Moonshot's
`tiktoken.model` or SentencePiece's `tokenizer.model`, of which one is made at load. With the seven
files that mistral-common carries, tokens of 366 texts were those of mistral-common and
SentencePiece, and tiktoken's with Moonshot's way to cut; the tests train tokenizers of their own.

GGUF files, also in parts, are read with their own tokenizer and chat template. `Q4_0`, `Q4_1`,
`Q5_0`, `Q5_1`, `Q8_0`, `Q4_K` and `Q5_K` become MLX's affine codes of the same numbers in groups of
32, `MXFP4` becomes MLX's; other types (`Q2_K`, `Q3_K`, `Q6_K`, `IQ*`, `TQ*`) are unpacked, and the
log says so. Scales are exact in float32; bfloat16, which a GPU computes in, rounds them by up to
one part in 512, float16 (`--dtype float16`) holds those of `Q4_0` to `Q8_0` exactly. What a file
leaves out (the windows of Mistral and StarCoder 2) is as llama.cpp takes it. Encoders (`mmproj`)
are not read: of models that see, a GGUF file serves the text. Architectures, and the `model_type`
of what they hold where it has another name:

ARCHITECTURES.

NOT_FROM_GGUF.

`--adapter FOLDER` merges a LoRA adapter, as PEFT or mlx-lm saves it, into the weights at load;
packed matrices that it touches are unpacked. DoRA, mlx-lm's factors of experts and other settings
that change the result are refused by name. `--adapter NAME=FOLDER` leaves the weights as they are:
see [adapters](adapters.md).

Each family is held against the implementation in the third column, on small random weights in
float32, from checkpoints in float32, float16 and bfloat16: logits to 1e-4 of the largest and
greedy tokens, of the whole sequence and read in chunks; and each request alone against the same
request in company ([parity](../ARCHITECTURE.md)). Where mlx-lm has the family, its conversions,
plain and of 8 bits, are opened in their own names. No test downloads published weights.

What encoders make of pictures, sounds and videos is held to 2e-4 of the largest, and the logits
behind it, end to end, to 1e-4. Of Gemma 4 and the families of `QwenVision`, logits with media are
within 1e-4 of float64 too, and over several draws as near to it as transformers' own in float32
(`test_rounding.py`). Random weights have to be drawn with care for that: query norms that make
scores of ten, or states that last one token, make a hundred times as much of each rounding, in
either implementation.

| `model_type` | Models | Held against | Configurations |
| --- | --- | --- | --- |
"""

NOTES = """
Encoders (`bert`, `camembert`, `modernbert`, `roberta`, `xlm-roberta`, and `gemma3_text` with
`use_bidirectional_attention`) are held by their hidden states and the logits of their
classification heads; they [embed and score](embeddings.md) and generate nothing.

RoPE may be plain, linear, dynamic, llama3, YaRN or LongRoPE. YaRN lengthens the context that is
offered to `factor` times that of training. LongRoPE has factors for a short and for a long
context. The long ones serve every request, unless `--max-context` is no longer than the context
of training: so a token's key does not depend on what follows, where the published code changes
from one set to the other within a sequence. "Dynamic" is served up to `max_position_embeddings`,
within which it changes nothing.

In DeepSeek V3.2, GLM-5 and Hunyuan 4 an indexer chooses `index_topk` keys for each query, of keys
with equal scores the first. Its own keys are kept beside the latents, unpacked in every KV format.
Mamba, Falcon Mamba and Mamba 2, without attention, have no limit of their own: a million tokens are
offered. Channels of Kimi Linear's and Ling 3.0's states forget each by itself. Quire's CPU kernels
know that. MLX's fused delta rule does not, so that without them, and on a GPU, these states are
advanced token by token in plain operations, and prompts are read slowly for the model's size.

A chat template gets a history of calls in the form that it shows: null or empty content, arguments
as an object or as text, text beside calls in a message of its own, tools in the system message.
Quire finds the form out by rendering small conversations.

DeepSeek V3.2 publishes no template but code (`encoding_dsv32.py`), which Quire's own template
follows: with `enable_thinking` (off by default) reasoning of earlier turns is left out, that
between the calls of the last turn stays. `deepseek` and `dsml` both read DSML calls of V3.2 and V4.

Reasoning that the prompt opens is known by its mark behind the last added token, whether the mark
is a token or spelled (Olmo 3).

What a model writes badly is read as it is meant where that can be told, and else is text. Decided:

* In JSON a backslash that begins no escape stands for itself (`"\\d+"`), as raw line ends do. A
  call's opener that is written twice counts once.
* In Python-style calls (LFM2, OLMo 3, Llama 4) a quote ends a string only where the call goes on
  behind it, so that `bash(command="print("hi")")` is read whole.
* Line ends beside a value in tags: Qwen's notation has one on each side. Seed's has one behind the
  opening tag, and one before the closing tag only with it. MiniMax's and DSML's have none.
* Where a closing `</parameter>` was left out, a tag on a line of its own that names another
  parameter of the tool ends the value.
* A call in open reasoning is a call. What follows it is reasoning if reasoning is closed within 512
  characters or another call comes, else the answer.
* Harmony's last channel in a header counts. Messages to recipients that are no tools of the client
  (`python`, `browser.search`) are reasoning on `analysis` and not shown otherwise.
* Types of schemas that are no JSON Schema (`float`, `int`, `bool`, `dict`, `list[str]`, `STRING`)
  are taken as what they mean; unknown ones leave the value's type unsaid.

Arguments stream from their 24th character on. A call that then turns out to be malformed ends the
answer as `max_tokens` would (`finish_reason: length`), with the part that was sent, also where
nothing is streamed; a shorter one is text.
"""

DIALECTS_TABLE = """\
Tool calls and reasoning are read by the dialect that the chat template means; `--dialect` takes
another. What published checkpoints of each family mean:

| Dialect | `model_type` |
| --- | --- |
"""

_SAME_AS = {
    "deepseek_ocr2": "deepseek_vl_v2",
    "deepseekocr": "deepseek_vl_v2",
    "deepseekocr_2": "deepseek_vl_v2",
    "gemma3n": "gemma3n_text",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v` and `glm4v_moe",
    "internvl_chat": "internvl",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "lfm2-vl": "lfm2_vl",
    "moondream2": "moondream1",
    "multi_modality": "deepseek_vl` and `deepseek_vl_hybrid",
    "mistral3": "mistral`, `ministral3` and `mistral4",
    "mimo_v2": "mimo_v2_flash",
    "step3p7": "step3p5",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "youtu_llm": "youtu",
}
HELD_AGAINST_MLX_VLM = {each["model_type"] for each in (FUSED, MOONDREAM, MOONDREAM2, PERCEPTION)}


def rows() -> Iterator[str]:
    """Yield one line a `model_type`."""
    tested = dict.fromkeys(TINY.values())
    own = {config()["model_type"] for config in tested}
    seen = {
        config["model_type"]
        for config in (
            *SEEING.values(),
            *SIGLIP.values(),
            *TILED.values(),
            CROSSING,
            HUNYUAN,
            HYBRID,
            *OCR.values(),
            WHISPERING,
        )
    }
    held = own | HELD_AGAINST_MLX_LM.keys() | HELD_AGAINST_MLX_VLM | seen
    for model_type, family in sorted(FAMILIES.items()):
        known = (CONFIGS | ENCODERS).items()
        variants = [n for n, config in known if config["model_type"] == model_type]
        names = ", ".join(name.removeprefix(model_type).strip("-") or "usual" for name in variants)
        by_mlx_lm = _SAME_AS.get(model_type, model_type) in HELD_AGAINST_MLX_LM
        library = "mlx-lm" if by_mlx_lm else "transformers"
        library = "mlx-vlm" if model_type in HELD_AGAINST_MLX_VLM else library
        if same := _SAME_AS.get(model_type):
            names = f"as `{same}`"
        elif not variants and model_type not in held:
            raise AssertionError(f"no test holds {model_type!r} against anything")
        yield f"| `{model_type}` | {family.title} | {library} | {names or 'usual'} |"


def dialects() -> Iterator[str]:
    """Yield one line a dialect."""
    for name in DIALECTS:
        spoken = sorted({m for e in PUBLISHED if e.dialect == name for m in e.model_types})
        yield f"| `{name}` | " + ", ".join(f"`{model_type}`" for model_type in spoken) + " |"


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


def document() -> str:
    """Return the whole page."""
    spoken: dict[str, list[str]] = {name: [] for name in sorted(ARCHITECTURES)}
    for model_type, name in GGUF.items():
        spoken[name].append(f"`{model_type}`")
    listed = (
        f"`{name}`" if types in ([], [f"`{name}`"]) else f"`{name}` ({', '.join(types)})"
        for name, types in spoken.items()
    )
    known = _filled(", ".join(listed))
    reasons = {name: NOT_FROM_GGUF.get(name) for name in sorted(FAMILIES.keys() - GGUF.keys())}
    others = ", ".join(f"`{name}`" + (f" ({why})" if why else "") for name, why in reasons.items())
    without = _filled(f"Not read from GGUF: {others}")
    introduction = INTRODUCTION.replace("NOT_FROM_GGUF", without).replace("ARCHITECTURES", known)
    parts = [introduction + "\n".join(rows()), NOTES]
    return "\n".join([*parts, DIALECTS_TABLE + "\n".join(dialects())]) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())

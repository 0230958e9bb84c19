"""A small Whisper: its configuration, its tokenizer and the settings that come with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.core.byte_alphabet import LETTER_OF

LANGUAGES = ("en", "de", "fr")
_SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
FIRST = 256
"""The first token behind the bytes: the end."""
START, NO_TIMES = FIRST + 1, FIRST + len(_SPECIAL) - 1
FIRST_TIME = NO_TIMES + 1
TIMES = 1501
"""Tokens of times, 20 ms apart."""
IDS = {text: FIRST + number for number, text in enumerate(_SPECIAL)}
ROWS = 1500

CONFIG: dict[str, Any] = {
    "model_type": "whisper",
    "vocab_size": FIRST_TIME + TIMES,
    "num_mel_bins": 80,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "max_source_positions": ROWS,
    "max_target_positions": 640,
    "activation_function": "gelu",
    "scale_embedding": False,
    "decoder_start_token_id": START,
    "bos_token_id": FIRST,
    "eos_token_id": FIRST,
    "pad_token_id": FIRST,
}

GENERATION: dict[str, Any] = {
    "decoder_start_token_id": START,
    "bos_token_id": FIRST,
    "eos_token_id": FIRST,
    "pad_token_id": FIRST,
    "is_multilingual": True,
    "lang_to_id": {f"<|{each}|>": IDS[f"<|{each}|>"] for each in LANGUAGES},
    "task_to_id": {each: IDS[f"<|{each}|>"] for each in ("translate", "transcribe")},
    "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": IDS["<|startofprev|>"],
    "max_initial_timestamp_index": 50,
    "suppress_tokens": [1, 2, START, *range(IDS["<|translate|>"], FIRST_TIME)],
    "begin_suppress_tokens": [220, FIRST],
}

EXTRACTOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_value": 0.0,
}


def tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are bytes, marks and times."""
    made = Tokenizer(models.BPE({letter: byte for byte, letter in LETTER_OF.items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
    made.add_tokens([AddedToken(f"<|{each / 50:.2f}|>") for each in range(TIMES)])
    return made


def write_files(folder: Path) -> None:
    """Write what lies beside the weights."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    tokenizer().save(str(folder / "tokenizer.json"))

"""Small tokenizers of each kind, trained on the spot."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, twice: 1,234.50 times in total.",
    "def render(messages, *, tools=None):\n    return {'role': 'user', 'n': [1, 2]}\n",
    "Größe, naïve café, señor; Привет, мир! こんにちは世界。 你好，世界",
    "she sells sea shells; the shells she sells are sea shells, for sure",
    "emoji 🙂🙃 family 👩‍👩‍👧 flags 🇩🇪🇯🇵 and  several   spaces\n\n\ttabs",
] * 4

SPECIAL = ["<unk>", "<s>", "</s>", "<|turn>", "<turn|>"]
PLAIN_ADDED = ["<think>", "</think>"]  # added, but not special


def _finish(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    return backend


def _edited(backend: tokenizers.Tokenizer, edit: Any) -> tokenizers.Tokenizer:
    state = json.loads(backend.to_str())
    edit(state)
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def byte_level() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer like those of GPT-2, Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _finish(backend)


def _byte_fallback_bpe() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    # Only ASCII pieces are learnt, so that everything else takes the way through bytes.
    ascii_only = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(ascii_only, trainer)

    def with_bytes(state: dict[str, Any]) -> None:
        vocab = state["model"]["vocab"]
        for byte in range(256):
            vocab[f"<0x{byte:02X}>"] = len(vocab)
        state["model"]["byte_fallback"] = True

    return _edited(backend, with_bytes)


def gemma_like() -> tokenizers.Tokenizer:
    """Return spaces as ▁ and bytes as <0x0A>; nothing is stripped."""
    backend = _byte_fallback_bpe()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _finish(backend)


def llama2_like() -> tokenizers.Tokenizer:
    """Return the tokenizer with a space put before each text and taken off again."""
    backend = _byte_fallback_bpe()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finish(backend)


def unigram() -> tokenizers.Tokenizer:
    """Return SentencePiece's unigram model with Metaspace."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _finish(backend)


def word_piece() -> tokenizers.Tokenizer:
    """Return BERT's tokenizer, whose decoder looks at neighbours."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["<unk>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _finish(backend)


def without_decoder() -> tokenizers.Tokenizer:
    """Return a tokenizer without a decoder, which joins tokens by spaces."""
    backend = word_piece()
    backend.decoder = None
    return backend


KINDS = {
    made.__name__: made
    for made in (byte_level, gemma_like, llama2_like, unigram, word_piece, without_decoder)
}
PIECEWISE = ("byte_level", "gemma_like", "llama2_like", "unigram")


@cache
def made(kind: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of that kind; trained once a run."""
    return KINDS[kind]()

"""Trains the tokenizer on generated text and writes its two files into the model's folder."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat import MODEL_DIR, answer_of, prompt_of
from training.data.item import draw
from training.data.mixture import TEXT_MIXTURE

VOCABULARY = 3072
SEED = 20261120
ITEMS = 40_000

NAMED = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "stc_token": "<|tool_call>",
    "etc_token": "<tool_call|>",
    "std_token": "<|tool>",
    "etd_token": "<tool|>",
    "str_token": "<|tool_response>",
    "etr_token": "<tool_response|>",
    "escape_token": '<|"|>',
    "think_token": "<|think|>",
    "soc_token": "<|channel>",
    "eoc_token": "<channel|>",
    "sot_token": "<|turn>",
    "eot_token": "<turn|>",
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
STANDARD = ("pad_token", "eos_token", "bos_token", "unk_token", "mask_token")

PIECES = Regex(r" ?\p{L}+|\p{N}|\n| ?[^\s\p{L}\p{N}]+|\s")
"""Words with the space before them; digits and line ends alone; runs of punctuation."""


def corpus(seed: int = SEED) -> Iterator[str]:
    """Training items as text, without the control tokens that no merge may cross."""
    rng = random.Random(seed)
    skills, weights = zip(*TEXT_MIXTURE.items(), strict=True)
    for _ in range(ITEMS):
        generator = rng.choices(skills, weights)[0]
        item = draw(generator, rng, "train")
        text = prompt_of(item) + answer_of(item)
        for token in NAMED.values():
            text = text.replace(token, "\n")
        yield text[:2000]


def train() -> Tokenizer:
    """A byte-level BPE: any text comes back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in NAMED.values()],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def main() -> None:
    tokenizer = train()
    tokenizer.save(str(MODEL_DIR / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Gemma4Processor",
        "model_max_length": 131072,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        **{name: NAMED[name] for name in STANDARD},
        "extra_special_tokens": {
            name: token for name, token in NAMED.items() if name not in STANDARD
        },
    }
    (MODEL_DIR / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"vocabulary {tokenizer.get_vocab_size()}")


if __name__ == "__main__":
    main()

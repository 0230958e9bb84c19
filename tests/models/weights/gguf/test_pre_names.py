"""Names in `tokenizer.ggml.pre`: those that llama.cpp knows, and what is missing here."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from quire.models.tokenizers.pretokenizers import PRE_TOKENIZERS

LLAMA_CPP = frozenset(
    [
        "a.x-4.0",
        "afmoe",
        "bailingmoe",
        "bailingmoe2",
        "bloom",
        "chameleon",
        "chatglm-bpe",
        "codeshell",
        "cohere2moe",
        "command-r",
        "dbrx",
        "deepseek-coder",
        "deepseek-llm",
        "deepseek-r1-qwen",
        "deepseek-v3",
        "default",
        "exaone",
        "exaone-moe",
        "exaone4",
        "f2llmv2",
        "falcon",
        "falcon-h1",
        "falcon3",
        "gemma4",
        "gigachat",
        "glm4",
        "glm5",
        "gpt-2",
        "gpt-4o",
        "gpt3-finnish",
        "granite-docling",
        "granite-embed-multi-311m",
        "granite-embed-multi-97m",
        "grok-2",
        "hunyuan",
        "hunyuan-dense",
        "hy_v4",
        "jais",
        "jais-2",
        "jina-de",
        "jina-es",
        "jina-v1-en",
        "jina-v2-code",
        "jina-v2-de",
        "jina-v2-es",
        "jina-v5-nano",
        "joyai-llm",
        "kanana2",
        "kimi-k2",
        "kormo",
        "laguna",
        "lfm2",
        "llada-moe",
        "llama-bpe",
        "llama-v3",
        "llama3",
        "llama4",
        "megrez",
        "mellum",
        "mellum2",
        "midm-2.0",
        "minerva-7b",
        "minicpm5",
        "minimax-m2",
        "modern-bert",
        "mpt",
        "olmo",
        "phi-2",
        "pixtral",
        "poro-chat",
        "qwen2",
        "qwen35",
        "refact",
        "roberta-bpe",
        "sarvam-moe",
        "seed-coder",
        "smaug-bpe",
        "smollm",
        "solar-open",
        "spark2_5",
        "stablelm2",
        "starcoder",
        "superbpe",
        "talkie",
        "tekken",
        "tiny_aya",
        "trillion",
        "ufakzeka",
        "viking",
        "whitespace",
        "youtu",
    ]
)
"""All that its `llama-vocab.cpp` compares with (llama-cpp-python 0.3.36)."""
MISSING = {
    "chameleon": "of an architecture that no family reads",
    "gemma4": "tokenizer.ggml.model says so already, and the tokens are no bytes",
    "granite-embed-multi-311m": "its tokens are no bytes; of an encoder",
    "jina-v1-en": "puts a separator behind texts; of an encoder",
    "jina-v2-code": "likewise",
    "roberta-bpe": "likewise",
    "sarvam-moe": "its tokens are no bytes; of an architecture that no family reads",
    "whitespace": "its tokens are no bytes; of an encoder",
}


def test_all_names_are_known_but_those_with_a_reason() -> None:
    assert LLAMA_CPP - PRE_TOKENIZERS.keys() == MISSING.keys()
    ours = PRE_TOKENIZERS.keys() - LLAMA_CPP
    assert not ours, "a name that llama.cpp does not have"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("bailingmoe2", "bailingmoe"),
        ("cohere2moe", "tiny_aya"),
        ("gigachat", "gpt-2"),
        ("granite-docling", "gpt-2"),
        ("kanana2", "gpt-4o"),
        ("kormo", "qwen2"),
        ("midm-2.0", "llama-bpe"),
        ("solar-open", "stablelm2"),
        ("trillion", "gpt-2"),
    ],
)
def test_some_are_names_of_others(alias: str, name: str) -> None:
    assert PRE_TOKENIZERS[alias] == PRE_TOKENIZERS[name]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("tiny_aya", "It's 1234567 b", ["It's", " ", "1", "234", "567", " b"]),
        ("afmoe", "12345 b 7", ["12", "345", " b", " ", "7"]),
        ("minicpm5", "x1234567", ["x", "123", "456", "7"]),
        ("superbpe", "two words 1234567", ["two words ", "1", "234", "567"]),
        ("viking", "one two, 34", ["one", " two", ",", " ", "3", "4"]),
        ("poro-chat", "one two, 34", ["one", " two", ",", " 34"]),
        ("exaone-moe", "two words 12", ["two words", " ", "1", "2"]),
        ("youtu", "Ab가나 12", ["Ab", "가나", " ", "1", "2"]),
        ("laguna", "a b\n\nc 12", ["a", " b", "\n\n", "c", " ", "1", "2"]),
        ("ufakzeka", "It's", ["It", "'s"]),
        ("falcon", "it's `1234", ["it", "'", "s", " ", "`", "123", "4"]),
        ("jais-2", "a" + 5 * " " + "b", ["a", 4 * " ", " b"]),
        ("spark2_5", "a 12\n\n", ["a", " ", "1", "2", "\n", "\n"]),
        ("solar-open", "It'S 12", ["It", "'S", " ", "1", "2"]),
    ],
)
def test_texts_are_cut_as_published(name: str, text: str, pieces: list[str]) -> None:
    steps = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TOKENIZERS[name].cuts]
    found = pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
    assert [piece for piece, _ in found] == pieces

"""Splitting of texts before byte-level BPE, by the name in `tokenizer.ggml.pre`.

The expressions are those of published `tokenizer.json` files, for the names in llama.cpp's list, or
llama.cpp's own expressions where it declares them equivalent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_HAN = r"&&[^\p{Han}]]"


def _words(numbers: str) -> str:
    """Return Llama 3's expression, with `numbers` for digits."""
    return rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{_REST}"


def _cased(suffix: str, numbers: str, rest: str, han: bool = True) -> str:
    """Return GPT-4o's expression, in which capitals start a word."""
    upper, lower = _UPPER, _LOWER
    if not han:
        upper, lower = (letters[:-1] + _NOT_HAN for letters in (upper, lower))
    before = r"[^\r\n\p{L}\p{N}]?"
    first = rf"{before}{upper}*{lower}+{suffix}"
    second = rf"{before}{upper}+{lower}*{suffix}"
    return rf"{first}|{second}|{numbers}|{rest}"


@dataclass(frozen=True)
class PreTokenizer:
    """A way to split texts.

    Attributes:
        cuts: expressions, applied in order; each match becomes a piece of its own.
        gpt2: whether GPT-2's expression is applied last.
        nfc: whether texts are normalised to NFC first.
        whole: whether a piece that is a token is not merged from smaller ones.
        starts: whether texts start with the start token by default.
    """

    cuts: tuple[str, ...] = ()
    gpt2: bool = False
    nfc: bool = False
    whole: bool = False
    starts: bool = False

    def components(self) -> list[dict[str, Any]]:
        """Return the components in the form of `tokenizer.json`."""
        steps: list[dict[str, Any]] = [
            {
                "type": "Split",
                "pattern": {"Regex": cut},
                "behavior": "Isolated",
                "invert": False,
            }
            for cut in self.cuts
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        return [*steps, level | {"use_regex": self.gpt2}]


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS = PreTokenizer((r"\p{N}",), gpt2=True)
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), whole=True, starts=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = PreTokenizer((_cased(_WORDS + "?", r"\p{N}{1,3}", _SLASH),))
_HAN = r"[一-龥぀-ゟ゠-ヿ]+"
_SYMBOLS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3_WORDS = _SYMBOLS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        _HAN,
        _DEEPSEEK3_WORDS + r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_CJK = r"[一-龥ࠀ-一가-퟿]+"
# The escaped characters would be changed by Unicode normalisation.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ"
    "-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹ"
    "ℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BY_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "olmo", "exaone4", "a.x-4.0", "mellum", "gigachat", "trillion"),
            *("granite-docling", "mpt", "jais", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
            "modern-bert",
        ),
        _GPT2,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS
    ),
    "command-r": replace(_DIGITS, nfc=True),
    **dict.fromkeys(
        (
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"),
            *("midm-2.0", "jina-v5-nano"),
        ),
        _LLAMA3,
    ),
    **dict.fromkeys(
        ("dbrx", "smaug-bpe", "chatglm-bpe"), replace(_LLAMA3, whole=False, starts=False)
    ),
    **dict.fromkeys(("glm4", "glm5"), replace(_LLAMA3, starts=False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"), _QWEN2),
    **dict.fromkeys(
        ("stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"), replace(_QWEN2, nfc=False)
    ),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", *_QWEN2.cuts)),
    "ufakzeka": PreTokenizer((_QWEN2.cuts[0].removeprefix(f"{_WORDS}|"),)),
    "qwen35": PreTokenizer(
        (
            _WORDS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        nfc=True,
    ),
    "tekken": PreTokenizer((_cased("", r"\p{N}", _SLASH),), whole=True, starts=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), _GPT4O),
    "granite-embed-multi-97m": replace(_GPT4O, whole=True),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.cuts))
    ),
    "youtu": PreTokenizer(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _HAN,
            _cased(_WORDS + "?", r"\p{N}", _SLASH),
        ),
        whole=True,
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "spark2_5": PreTokenizer(
        (
            *_DEEPSEEK3.cuts[:2],
            _DEEPSEEK3_WORDS + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "afmoe": PreTokenizer(
        (
            _BY_THOUSANDS,
            r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            _DEEPSEEK3.cuts[2],
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _CJK,
            r"\p{N}",
        )
    ),
    "kimi-k2": PreTokenizer(
        (r"\p{Han}+|" + _cased(_WORDS + "?", r"\p{N}{1,3}", _REST, han=False),)
    ),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    "exaone-moe": PreTokenizer(
        (
            _WORDS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole=True),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "jais-2": PreTokenizer(
        (
            rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
            r"|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)"
            r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "viking": PreTokenizer((_SENTENCES, r"\p{N}")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_SENTENCES,))),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]")),
    "seed-coder": PreTokenizer(
        (
            rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    # For files older than these names.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", r"\p{N}+", r"[0-9][0-9][0-9]"), gpt2=True),
}

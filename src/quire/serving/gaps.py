"""Prompts that ask a code model for what is missing between two texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.errors import RequestError
from quire.serving.prompts import Prompts
from quire.text.tokenizer import Tokenizer

Text = str | Sequence[int]

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),  # Code Llama, in GGUF files of other converters
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
)
"""Spellings that llama.cpp looks for in a vocabulary (`src/llama-vocab.cpp`); Code Llama's stand
in transformers' `tokenization_code_llama.py`, too.
"""
_FILES = ("<|file_sep|>", "<file_sep>")
_ENDS = (
    *_FILES,
    *("<|repo_name|>", "<|fim_pad|>", "<|file_separator|>", "<reponame>", "<fim_pad>", "▁<EOT>"),
)


@dataclass(frozen=True, slots=True)
class GapMarks:
    """The tokens with which a model was taught to fill gaps.

    Attributes:
        before, after, middle: stand before the text ahead of the gap, the text behind it, and the
            answer.
        file: stands before each file of a context; None where the tokenizer has no such token.
        ends: tokens with which the model ends a gap, beside its usual end tokens.
    """

    before: int
    after: int
    middle: int
    file: int | None
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> GapMarks | None:
        """Return a tokenizer's marks; None if it has none."""
        for names in _MARKS:
            before, after, middle = (tokenizer.token_id(name) for name in names)
            if before is None or after is None or middle is None:
                continue
            file = next(iter(_known(tokenizer, _FILES)), None)
            return cls(before, after, middle, file=file, ends=frozenset(_known(tokenizer, _ENDS)))
        return None


class Gaps:
    """Makes prompts of one model from texts around a gap.

    Args:
        param: the request's field that asks for it, for errors.

    Raises:
        RequestError: the model's tokenizer has no tokens for that.
    """

    def __init__(self, prompts: Prompts, param: str) -> None:
        marks = GapMarks.of(prompts.tokenizer)
        if marks is None:
            raise RequestError(
                f"'{param}' needs a tokenizer with fill-in-the-middle tokens, which this "
                "model does not have; code models do.",
                param=param,
                code="unsupported_parameter",
            )
        self._prompts = prompts
        self._marks = marks

    @property
    def ends(self) -> frozenset[int]:
        """Tokens with which the model ends a gap, beside its usual end tokens."""
        return self._marks.ends

    def prompt(
        self, before: Text, after: Text, *, files: Sequence[str] = (), answer_start: str = ""
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt.

        Args:
            before, after: the texts around the gap, or their token ids.
            files: of the context, in order.
            answer_start: how the answer starts.

        Raises:
            RequestError: a text is longer than the context.
        """
        marks = self._marks
        mark = [] if marks.file is None else [marks.file]
        context = [token for file in files for token in (*mark, *self._ids(file))]
        return (
            *self._prompts.encode("", "prompt", add_special_tokens=True),
            *context,
            *(mark if files else ()),
            *(marks.before, *self._ids(before)),
            *(marks.after, *self._ids(after)),
            *(marks.middle, *self._ids(answer_start)),
        )

    def _ids(self, text: Text) -> Sequence[int]:
        if isinstance(text, str):
            return self._prompts.encode(text, "prompt", add_special_tokens=False)
        return text


def _known(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    """Return the ids of the spellings that the tokenizer has as tokens."""
    found = (tokenizer.token_id(name) for name in names)
    return [token for token in found if token is not None]

"""`quire convert`: packs a model's weights, and measures what that costs in quality."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from rich.console import Console

from quire.cli.files import check_writable, read
from quire.cli.kv_scores import Score
from quire.cli.progress import StartStage, shown
from quire.cli.settings import Command
from quire.cli.values import File, Flag, Folder, Model, Names, Whole
from quire.core.errors import QuireError
from quire.core.limited_files import TEXT_BYTES
from quire.demo import place
from quire.device.loading import load_mlx
from quire.device.private import use_private_cache

if TYPE_CHECKING:
    from quire.device.weights import Packing
    from quire.models.weights.convert import Converted
    from quire.models.weights.packing_plan import Choice

Bits = Literal[2, 3, 4, 5, 6, 8]
_FLOATS = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
_BITS = ("2", "3", "4", "5", "6", "8")


class ConvertCommand(Command):
    """Packs a model's weights by MLX's quantiser into a folder that Quire and mlx-lm open, and
    measures how far its predictions are from the original's.
    """

    command: ClassVar[str] = "convert"
    summary: ClassVar[str] = "quantise a model's weights"

    model: Annotated[Model, Flag(positional=True)] = Field(description="a folder or a hub id")
    out: Annotated[Folder, Flag("OUT", positional=True)] = Field(
        description="output folder, new or empty"
    )
    bits: Annotated[Bits, Whole, Flag("N")] = Field(
        4, description="bits of a weight: 2, 3, 4, 5, 6 or 8"
    )
    mode: Literal["affine", "mxfp4", "nvfp4", "mxfp8"] = Field(
        "affine",
        description="affine: integers with a scale and a bias per group; others: small floats",
    )
    group_size: Annotated[Literal[32, 64, 128], Whole, Flag("N")] = Field(
        64, description="weights that share a scale; small floats have fixed groups"
    )
    layers: Annotated[Names, Flag("LAYERS=BITS")] = Field(
        (),
        description="packings of single layers, separated by commas; the last that matches wins. "
        "LAYERS: embeddings, head, routers, or a shell pattern of weights' names; BITS: a number, "
        "a mode, or plain (not packed), which is the default of routers",
    )
    text: File | None = Field(
        None, description="evaluate on this text file; default: answers of built-in conversations"
    )
    tokens: Annotated[int, Field(ge=0), Flag("N")] = Field(
        4096,
        description="approximate tokens of text that quality is measured on; 0: no measurement",
    )
    report: File | None = Field(
        None, alias="json", description="write the results to this file, as JSON"
    )

    def run(self) -> int:
        """Convert, print sizes, what was left, and the measured quality.

        Raises:
            QuireError: an option is wrong, the output holds something, or the model cannot be
                read or is packed already.
        """
        if self.text is not None:
            read(self.text, "--text", TEXT_BYTES)
        check_writable(self.report, "--json")
        use_private_cache()
        load_mlx()
        # Here, because every command loads this module and few need mlx.
        from quire.device.device import open_device
        from quire.models.weights.convert import convert

        open_device("auto")
        source = place(self.model)
        with shown(Console(stderr=True)) as start_stage:
            made = convert(
                source, self.out, self._default(), choices=self._choices(), start_stage=start_stage
            )
            score = self._measured(source, start_stage) if self.tokens else None
        for line in _left(made):
            print(line, file=sys.stderr)
        print(_stated(made, score))
        if self.report is not None:
            self.report.write_text(json.dumps(_figures(made, score), indent=1) + "\n")
        return 0

    def _default(self) -> Packing:
        """Return the packing of layers for which `--layers` has nothing."""
        if self.mode == "affine":
            return self._packing(str(self.bits))
        if _FLOATS[self.mode][0] != self.bits and "bits" in self.model_fields_set:
            raise QuireError(f"--bits {self.bits}: {self.mode} has {_FLOATS[self.mode][0]} bits")
        return self._packing(self.mode)

    def _packing(self, word: str) -> Packing:
        from quire.device.weights import Packing

        if word in _FLOATS:
            bits, group = _FLOATS[word]
            return Packing(group, bits, word)
        return Packing(self.group_size, int(word), "affine")

    def _choices(self) -> list[Choice]:
        from quire.models.weights.packing_plan import ROUTERS, Choice

        choices = [Choice(ROUTERS, packing=None)]  # small, and they decide which experts compute
        for text in self.layers:
            pattern, _, word = text.rpartition("=")
            if not pattern or word not in (*_BITS, *_FLOATS, "plain"):
                known = ", ".join((*_BITS, *_FLOATS, "plain"))
                raise QuireError(f"--layers: {text!r} is not LAYERS=BITS, with one of {known}")
            choices.append(Choice(pattern, None if word == "plain" else self._packing(word)))
        return choices

    def _measured(self, source: str, start_stage: StartStage) -> Score:
        """Return how far the packed model's predictions diverge from the original's."""
        from functools import partial

        from quire.cli.kv_quality import Reader, compare, texts_of
        from quire.core.kv_format import KVFormat
        from quire.models.weights.loader import open_model
        from quire.text.template import ChatTemplate
        from quire.text.tokenizer import Tokenizer

        original, packed = open_model(source), open_model(str(self.out))
        tokenizer = Tokenizer.open(original.path)
        template = ChatTemplate.open(original.path, tokenizer.special_tokens)
        texts = texts_of(tokenizer, template, self.text, tokens=self.tokens)
        score = Score("packed", 0.0)
        readers = [partial(Reader, loaded, KVFormat()) for loaded in (original, packed)]
        compare(readers[0], readers[1:], texts, scores=[score], start_stage=start_stage)
        return score


def _left(made: Converted) -> list[str]:
    """Return a line for all matrices that stayed as they are and whose names differ by numbers."""
    similar: dict[tuple[str, str], list[str]] = {}
    for name, reason in made.left.items():
        similar.setdefault((re.sub(r"\d+", "#", name), reason), []).append(name)
    return [
        f"left unquantised: {names[0]}{f' and {len(names) - 1} more like it' * (len(names) > 1)}: "
        f"{reason}"
        for (_, reason), names in similar.items()
    ]


def _stated(made: Converted, score: Score | None) -> str:
    """Return the result, for people."""
    lines = [
        f"{made.packed} matrices quantised, {made.bits:.2f} bits a weight; "
        f"{made.bytes_before / 1e6:,.1f} MB became {made.bytes_after / 1e6:,.1f} MB"
    ]
    if score is not None:
        lines += [
            f"Compared with the original, over {score.judged:,} tokens:",
            f"  KL divergence   mean {score.kl_mean:.6f}, 99th percentile {score.kl_p99:.5f} nats",
            f"  same top token  {score.top1:.2%}",
            f"  perplexity      {score.perplexity:.4f}, the original's "
            f"{score.plain_perplexity:.4f}",
        ]
    return "\n".join(lines)


def _figures(made: Converted, score: Score | None) -> dict[str, Any]:
    measured = ("judged", "kl_mean", "kl_p99", "top1", "perplexity", "plain_perplexity")
    quality = {name: getattr(score, name) for name in measured} if score is not None else None
    return asdict(made) | {"quality": quality}

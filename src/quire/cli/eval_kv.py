"""`quire eval-kv`: measures each KV format's loss of quality on one model, against plain blocks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, ClassVar

from pydantic import Field
from rich.console import Console

from quire.cli.files import check_writable, read
from quire.cli.kv_scores import plot, table
from quire.cli.progress import shown
from quire.cli.settings import Command
from quire.cli.values import Count, File, Flag, Model, Names, Numbers, Paths, Place
from quire.core.errors import QuireError
from quire.core.kv_choice import offered, parse_format
from quire.core.kv_format import KVFormat
from quire.core.limited_files import TEXT_BYTES
from quire.demo import place
from quire.device.loading import load_mlx
from quire.device.private import use_private_cache

_FORMATS = (
    *("page-8", "page-6", "page-8/4", "page-4", "page-4/3", "page-3", "page-2"),
    *("uniform-8-g64", "uniform-4-g64", "turbo-4", "turbo-3.5"),
)


class EvalKVCommand(Command):
    """Measures what each KV format costs in quality, on one model, against plain blocks."""

    command: ClassVar[str] = "eval-kv"
    summary: ClassVar[str] = "measure the quality loss of KV formats"

    model: Annotated[Model | None, Flag(positional=True)] = Field(
        None, description="a folder or a hub id; default: the embedded model"
    )
    adapter: Annotated[Place | None, Flag("FOLDER")] = Field(
        None, description="a LoRA adapter, as for quire serve"
    )
    text: File | None = Field(
        None, description="evaluate on this text file; default: answers of built-in conversations"
    )
    tokens: Count = Field(8192, description="approximate tokens of text to evaluate on")
    formats: Annotated[Names, Flag("NAMES")] = Field(
        _FORMATS, description="names of the measured formats, separated by commas"
    )
    needles: Annotated[Numbers, Flag("LENGTHS")] = Field(
        (256, 1024), description="prompt lengths of the needle test in tokens, or none"
    )
    needles_each: Count = Field(1, description="needle prompts for each length and depth")
    prompts: Annotated[int, Field(ge=0), Flag("N")] = Field(
        16, description="maximum number of prompts that are continued greedily"
    )
    skills: Annotated[Paths, Flag("FILE", several=True)] = Field(
        (), description="files of questions with right answers, as in tests/data/skills"
    )
    skill_items: Count = Field(12, description="questions of each --skills file")
    as_served: bool = Field(
        False,
        description="leave the layers plain that `quire serve` leaves plain; default: quantise "
        "all layers",
    )
    report: File | None = Field(
        None, alias="json", description="write the results to this file, as JSON"
    )
    plot: File | None = Field(
        None, description="write a chart of divergence by bits to this file, as SVG"
    )

    def run(self) -> int:
        """Measure, and print the table. Return 1 if a format misses the limits of its gate.

        Raises:
            QuireError: the model cannot be opened, a format is not offered, or a file cannot be
                read or written.
        """
        formats = _formats(self.formats)
        for skills in self.skills:
            read(skills, "--skills", TEXT_BYTES)
        if self.text is not None:
            read(self.text, "--text", TEXT_BYTES)
        check_writable(self.report, "--json")
        check_writable(self.plot, "--plot")
        use_private_cache()
        load_mlx()
        # Here, because every command loads this module and few need mlx.
        from quire.cli.kv_quality import Plan, evaluate

        plan = Plan(
            adapter=self.adapter,
            text=self.text,
            tokens=self.tokens,
            lengths=self.needles,
            needles_each=self.needles_each,
            prompts=self.prompts,
            as_served=self.as_served,
            skills=self.skills,
            items=self.skill_items,
        )
        with shown(Console(stderr=True)) as start_stage:
            scores = evaluate(place(self.model), formats, plan, start_stage=start_stage)
        print(table(scores))
        if self.report is not None:
            self.report.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n")
        if self.plot is not None:
            self.plot.write_text(plot(scores[1:]))
        missed = [miss for score in scores[1:] for miss in score.misses(scores[0])]
        for miss in missed:
            print(f"missed: {miss}", file=sys.stderr)
        return 1 if missed else 0


def _formats(names: Sequence[str]) -> list[KVFormat]:
    known = {each.name for each in offered(block_size=64)}
    for name in names:
        if name not in known:
            raise QuireError(
                f"--formats: {name!r} is not a KV format; known are {', '.join(sorted(known))}"
            )
    return [parse_format(name) for name in names]

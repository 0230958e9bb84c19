"""`quire eval-kv`: what each KV format costs in quality, on one model, against plain blocks."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from quire.cli.kv_scores import plot, table
from quire.cli.progress import shown
from quire.core.errors import QuireError
from quire.core.kv_choice import offered, parse_format
from quire.core.kv_format import KVFormat
from quire.demo import MODEL_DIR
from quire.device.loading import load_mlx
from quire.device.private import use_private_cache

_FORMATS = "page-8,page-6,page-8/4,page-4,page-4/3,page-3,page-2,"
_FORMATS += "uniform-8-g64,uniform-4-g64,turbo-4,turbo-3.5"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "eval-kv", help="measure what KV formats cost in quality", description=__doc__
    )
    parser.add_argument(
        "model", nargs="?", help="a folder or a hub id; the embedded one if left out"
    )
    parser.add_argument("--adapter", metavar="FOLDER", help="a LoRA adapter, as for serve")
    parser.add_argument(
        "--text", type=Path, help="a file, all of it judged; else the answers of conversations"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of text, about")
    parser.add_argument("--formats", default=_FORMATS, help=f"default: {_FORMATS}")
    parser.add_argument(
        "--needles", default="256,1024", metavar="LENGTHS", help="prompt tokens, or none"
    )
    parser.add_argument("--needles-each", type=int, default=1, help="for each length and depth")
    parser.add_argument("--prompts", type=int, default=16, help="continued greedily, at most")
    parser.add_argument(
        "--skills",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="questions with their right answers, as in tests/data/skills",
    )
    parser.add_argument("--skill-items", type=int, default=12, help="of each file of --skills")
    parser.add_argument(
        "--as-served",
        action="store_true",
        help="leave plain what `quire serve` does by default; else every key is coded",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write an SVG of divergence over bits here")


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table; 1 if a format misses the bars of its gate.

    Raises:
        QuireError: the model cannot be opened, or a format is not offered.
    """
    formats = _formats(args.formats)
    lengths = _lengths(args.needles)
    use_private_cache()
    load_mlx()
    # Here, because every command loads this module and few need mlx.
    from quire.cli.kv_quality import Plan, evaluate

    plan = Plan(
        adapter=args.adapter,
        text=args.text,
        tokens=args.tokens,
        lengths=lengths,
        needles_each=args.needles_each,
        prompts=args.prompts,
        as_served=args.as_served,
        skills=tuple(args.skills),
        items=args.skill_items,
    )
    with shown(Console(stderr=True)) as begin_stage:
        scores = evaluate(args.model or str(MODEL_DIR), formats, plan, begin_stage)
    print(table(scores))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n")
    if args.plot is not None:
        args.plot.write_text(plot(scores[1:]))
    missed = [miss for score in scores[1:] for miss in score.misses(scores[0])]
    for miss in missed:
        print(f"missed: {miss}", file=sys.stderr)
    return 1 if missed else 0


def _formats(text: str) -> list[KVFormat]:
    known = {each.name for each in offered(page_tokens=64)}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise QuireError(f"--formats: {name!r} is not offered; offered are {sorted(known)}")
    return [parse_format(name) for name in names]


def _lengths(text: str) -> tuple[int, ...]:
    if text.strip().lower() == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise QuireError(f"--needles: {text!r} is no list of lengths, nor 'none'") from None

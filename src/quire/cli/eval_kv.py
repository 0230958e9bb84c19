"""`quire eval-kv`: what each KV format costs in quality, on one model, against plain pages."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from quire.cache.formats.choose import offered, parse_format
from quire.cache.specs import KVFormat
from quire.cli.kv_quality import (
    PAGE_TOKENS,
    Score,
    bits_an_element,
    generate,
    needle,
    teacher_forced,
)
from quire.demo import MODEL_DIR
from quire.errors import QuireError
from quire.models.loader import LoadedModel, open_model
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

_FORMATS = "page-8,page-6,page-8/4,page-4,page-4/3,page-3,page-2,"
_FORMATS += "uniform-8-g64,uniform-4-g64,turbo-4,turbo-3.5"
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_CONTINUED = 64
_OPENINGS = (
    "Tell me something about yourself.",
    "What is the capital of France?",
    "Repeat after me: the quick brown fox jumps over the lazy dog.",
    "What is 27 plus 45?",
    "My name is Anna and I live in Rome.",
    "Count from 1 to 20.",
    "Write a short story about a boat and a dog.",
    "Which colours does the rainbow have?",
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "eval-kv", help="measure what KV formats cost in quality", description=__doc__
    )
    parser.add_argument(
        "model", nargs="?", help="a folder or a hub id; the embedded one if left out"
    )
    parser.add_argument(
        "--text", type=Path, help="a file to read; else what the model itself writes"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of text, at most")
    parser.add_argument("--formats", default=_FORMATS, help=f"default: {_FORMATS}")
    parser.add_argument(
        "--needles", default="256,1024", metavar="LENGTHS", help="prompt tokens, or none"
    )
    parser.add_argument("--needles-each", type=int, default=1, help="for each length and depth")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write an SVG of divergence over bits here")


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table; 1 if a format misses the bars of its gate.

    Raises:
        QuireError: the model cannot be opened, or a format is not offered.
    """
    formats = _formats(args.formats)
    lengths = _lengths(args.needles)
    loaded = open_model(args.model or str(MODEL_DIR))
    scores = evaluate(loaded, formats, args.text, args.tokens, lengths, args.needles_each)
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
    known = {each.name for each in offered(PAGE_TOKENS)}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise QuireError(f"--formats: {name!r} is not offered; offered are {sorted(known)}")
    return [parse_format(name) for name in names]


def _lengths(text: str) -> list[int]:
    if text.strip().lower() == "none":
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise QuireError(f"--needles: {text!r} is no list of lengths, nor 'none'") from None


def evaluate(
    loaded: LoadedModel,
    formats: Sequence[KVFormat],
    text: Path | None,
    tokens: int,
    lengths: Sequence[int],
    needles_each: int,
) -> list[Score]:
    """Scores of plain, first, and of each format."""
    tokenizer = Tokenizer.open(loaded.path)
    template = ChatTemplate.open(loaded.path, tokenizer.special_tokens)
    every = [KVFormat(), *formats]
    scores = [Score(each.name, bits_an_element(loaded, each)) for each in every]
    openings = [_prompt(tokenizer, template, line) for line in _OPENINGS]
    texts = _own_texts(loaded, openings, tokens)
    if text is not None:
        texts = [tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]]
    teacher_forced(loaded, every, texts, scores)
    # Beginnings long enough that most of what is read is coded.
    cuts = [read[:length] for read in texts for length in (97, 161) if len(read) > length]
    _continue(loaded, every, openings + cuts, scores)
    for length in lengths:
        _find_needles(loaded, tokenizer, template, every, length, needles_each, scores)
    return scores


def _prompt(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> list[int]:
    if not template.exists:
        return tokenizer.encode(text, add_special_tokens=True)
    rendered = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)


def _own_texts(
    loaded: LoadedModel, openings: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """What the model writes by itself, seeded: text that it has something to say about."""
    each = max(2, tokens // len(openings))
    answers = generate(loaded, KVFormat(), openings, max_tokens=each, temperature=1.0)
    return [[*prompt, *answer][:each] for prompt, answer in zip(openings, answers, strict=True)]


def _continue(
    loaded: LoadedModel,
    formats: Sequence[KVFormat],
    prompts: Sequence[Sequence[int]],
    scores: Sequence[Score],
) -> None:
    answers = [generate(loaded, each, prompts, max_tokens=_CONTINUED) for each in formats]
    for score, got in zip(scores, answers, strict=True):
        equal = [a == b for a, b in zip(got, answers[0], strict=True)]
        score.greedy = sum(equal) / len(equal)


def _find_needles(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    formats: Sequence[KVFormat],
    length: int,
    each: int,
    scores: Sequence[Score],
) -> None:
    items = []
    for depth in _DEPTHS:
        for seed in range(each):
            sentences = 1
            while True:  # a sentence's tokens depend on the tokenizer
                text, code = needle(sentences, depth, seed)
                prompt = _prompt(tokenizer, template, text)
                if len(prompt) >= length:
                    break
                sentences = max(sentences + 1, sentences * length // (len(prompt) + 8))
            items.append((depth, prompt, code))
    for format, score in zip(formats, scores, strict=True):
        prompts = [prompt for _, prompt, _ in items]
        stops = frozenset(loaded.eos_ids)
        answers = generate(loaded, format, prompts, max_tokens=24, stops=stops)
        for (depth, _, code), answer in zip(items, answers, strict=True):
            score.needles.append((length, depth, code in tokenizer.decode(answer)))


# -- showing ---------------------------------------------------------------------------------------


def table(scores: Sequence[Score]) -> str:
    """A line a format, for people, in Markdown."""
    lengths = sorted({length for length, _, _ in scores[0].needles})
    heads = ["format", "bits", "mean KL", "p99 KL", "top-1", "perplexity", "greedy 64"]
    rows = [[*heads, *(f"needles {length}" for length in lengths)]]
    for score in scores:
        row = [score.format, f"{score.bits:.2f}", f"{score.kl_mean:.5f}", f"{score.kl_p99:.4f}"]
        row += [f"{score.top1:.2%}", f"{score.perplexity:.4f}", f"{score.greedy:.0%}"]
        for length in lengths:
            found = [found for size, _, found in score.needles if size == length]
            row.append(f"{sum(found)}/{len(found)}")
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


_COLOURS = {"page": "#1b7f4d", "uniform": "#b5542b", "turbo": "#3a5fb0", "plain": "#555555"}
_SIZE, _MARGIN = (640, 400), 60


def plot(scores: Sequence[Score]) -> str:
    """Mean KL divergence (logarithmic) over bits an element, as SVG."""
    wide, high = _SIZE
    floor, ceiling = 1e-7, 10.0
    most = max([8.5, *(score.bits for score in scores)])

    def place(bits: float, kl: float) -> tuple[float, float]:
        share = math.log10(max(kl, floor) / floor) / math.log10(ceiling / floor)
        across = _MARGIN + bits / most * (wide - 2 * _MARGIN)
        return across, high - _MARGIN - share * (high - 2 * _MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<text x="{wide / 2}" y="{high - 15}" text-anchor="middle">bits an element</text>',
        f'<text x="{_MARGIN}" y="25">mean KL divergence from plain, nats a token</text>',
    ]
    for power in range(-7, 2):
        _, y = place(0, 10.0**power)
        parts.append(f'<line x1="{_MARGIN}" x2="{wide - 20}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_MARGIN - 8}" y="{y + 4}" text-anchor="end">1e{power}</text>')
    for bits in range(int(most) + 1):
        x, _ = place(bits, 1)
        parts.append(f'<text x="{x}" y="{high - _MARGIN + 18}" text-anchor="middle">{bits}</text>')
    for score in scores:
        x, y = place(score.bits, score.kl_mean)
        colour = _COLOURS[score.format.split("-")[0]]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 7:.1f}" y="{y + 4:.1f}">{score.format}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"

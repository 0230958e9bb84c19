"""Scores of KV formats: their limits, a table and a plot. Imports no MLX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gate:
    """The limits that a format must keep, all relative to plain blocks.

    Attributes:
        perplexity: largest ratio to plain's perplexity.
        skill: largest loss in the share of right answers, for a skill or a needle length.
    """

    name: str
    kl_mean: float
    kl_p99: float
    top1: float
    perplexity: float
    skill: float


NEAR_LOSSLESS = Gate("near-lossless", 0.002, kl_p99=0.03, top1=0.985, perplexity=1.005, skill=0.005)
BALANCED = Gate("balanced", 0.01, kl_p99=0.15, top1=0.965, perplexity=1.01, skill=0.01)
GATES = {"page-8": NEAR_LOSSLESS, "page-4": BALANCED}


@dataclass(slots=True)
class Score:
    """The measurements of one format. Divergences are in nats a token.

    Attributes:
        bits: bits per element of keys and values, including scales and plain layers.
        judged: number of judged tokens, which the next figures cover: answers of conversations, or
            all tokens.
        kl_prompts: mean divergence of the tokens that are only read; reported, no gate. Models
            that learned from answers alone, as the embedded one, predict nothing there.
        greedy: share of continuations that equal plain's to their end, or for 64 tokens.
        needles: (length, depth, found) of each needle.
        skills: right answers and all answers, by skill.
    """

    format: str
    bits: float
    judged: int = 0
    kl_mean: float = 0.0
    kl_p99: float = 0.0
    kl_prompts: float = 0.0
    top1: float = 1.0
    perplexity: float = 0.0
    plain_perplexity: float = 0.0
    greedy: float = 1.0
    needles: list[tuple[int, float, bool]] = field(default_factory=list)
    skills: dict[str, tuple[int, int]] = field(default_factory=dict)

    def shares(self) -> dict[str, float]:
        """Return the share of right answers by skill and by needle length."""
        lengths = sorted({length for length, _, _ in self.needles})
        found = {length: [f for size, _, f in self.needles if size == length] for length in lengths}
        needles = {f"needles {length}": sum(f) / len(f) for length, f in found.items()}
        return needles | {name: right / asked for name, (right, asked) in self.skills.items()}

    def misses(self, plain: Score) -> list[str]:
        """Return descriptions of the gate's limits that the format misses."""
        gate = GATES.get(self.format)
        if gate is None:
            return []
        ratio = self.perplexity / self.plain_perplexity
        bars = [
            ("mean KL", self.kl_mean, gate.kl_mean, self.kl_mean <= gate.kl_mean),
            ("99th percentile of KL", self.kl_p99, gate.kl_p99, self.kl_p99 <= gate.kl_p99),
            ("top-1 agreement", self.top1, gate.top1, self.top1 >= gate.top1),
            ("perplexity ratio", ratio, gate.perplexity, ratio <= gate.perplexity),
        ]
        own, least = self.shares(), {n: s - gate.skill for n, s in plain.shares().items()}
        bars += [(name, own[name], bar, own[name] >= bar) for name, bar in least.items()]
        return [
            f"{self.format} ({gate.name}): {name} is {value:.4g}, the bar is {bar:.4g}"
            for name, value, bar, held in bars
            if not held
        ]


def table(scores: Sequence[Score]) -> str:
    """Return a Markdown table with one line a format."""
    lengths = sorted({length for length, _, _ in scores[0].needles})
    heads = [
        "format",
        "bits",
        "mean KL",
        "p99 KL",
        "KL prompts",
        "top-1",
        "perplexity",
        "greedy 64",
    ]
    skills = list(scores[0].skills)
    rows = [[*heads, *(f"needles {length}" for length in lengths), *skills]]
    for score in scores:
        row = [score.format, f"{score.bits:.2f}", f"{score.kl_mean:.6f}", f"{score.kl_p99:.5f}"]
        row.append(f"{score.kl_prompts:.5f}")
        row += [f"{score.top1:.2%}", f"{score.perplexity:.4f}", f"{score.greedy:.0%}"]
        for length in lengths:
            found = [found for size, _, found in score.needles if size == length]
            row.append(f"{sum(found)}/{len(found)}")
        row += [f"{right}/{asked}" for right, asked in (score.skills[name] for name in skills)]
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
    """Return an SVG of mean KL divergence (logarithmic) over bits per element."""
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
        colour = _COLOURS.get(score.format.split("-")[0], "#333333")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 7:.1f}" y="{y + 4:.1f}">{score.format}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"

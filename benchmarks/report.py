"""Writes the tables of `benchmarks/results/runs.md` from `benchmarks/results/*.json`.

python benchmarks/report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGIN = "<!-- tables: written by report.py -->"
END = "<!-- end of tables -->"
_ENGINE, _BARE = "quire engine alone", "the same, without prefix cache and drafts"
_BATCH_GENERATOR = "mlx-lm BatchGenerator alone"


def _alone(name: str) -> bool:
    """Return whether a contender runs without HTTP."""
    return name in (_ENGINE, _BARE, _BATCH_GENERATOR)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _grid(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(head), _row(["---"] + ["---:"] * (len(head) - 1)), *(_row(row) for row in rows)]


def _value(level: dict[str, Any] | None, name: str) -> str:
    if level is None:
        return "-"
    if name == "tokens_per_s":
        text = f"{level[name]:,.0f}"
        return f"{text} ({level['failed']} failed)" if level["failed"] else text
    spread = level.get(name)
    return f"{spread['median']:,.1f} / {spread['max']:,.0f}" if spread else "-"


def _ratios(contenders: dict[str, Any], streams: list[str]) -> list[str]:
    """Return Quire's ratios over HTTP: to its engine alone, and to the best peer over HTTP."""

    def rate(name: str, count: str) -> float | None:
        level = contenders.get(name, {}).get("levels", {}).get(count)
        return level["tokens_per_s"] if level else None

    peers = [name for name in contenders if not _alone(name) and name != "quire"]
    rows = []
    for label, ours, theirs in (
        ("quire / its engine alone", "quire", [_ENGINE]),
        ("quire / best peer over HTTP", "quire", peers),
        ("bare engine alone / BatchGenerator", _BARE, [_BATCH_GENERATOR]),
    ):
        cells = []
        for count in streams:
            a = rate(ours, count)
            b = max((r for name in theirs if (r := rate(name, count))), default=None)
            cells.append(f"{a / b:.2f}" if a and b else "-")
        if set(cells) != {"-"}:
            rows.append([label, *cells])
    return _grid(["ratio", *streams], rows) if rows else []


def telling_line(error: str) -> str:
    """Return the line of an error, with the end of a log, that says what happened."""
    lines = error.strip().splitlines()
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])


def peers_section(report: dict[str, Any]) -> list[str]:
    """Return the tables of one run of `peers.py`."""
    contenders = report["contenders"]
    streams = list(report["load"]["requests"])
    load, machine = report["load"], report["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        f"### Model: {report['model']}",
        "",
        f"`{report['command']}`, {machine['date']}, {machine['cores']} cores, MLX "
        f"{machine['mlx']['quire']} on the CPU, {versions}. Prompts of about "
        f"{load['prompt_tokens']} tokens, answers of up to {load['max_tokens']}, greedy.",
        "",
    ]
    titles = {
        "tokens_per_s": "Tokens/s over all streams, median of the rounds, by streams",
        "ttft_ms": "Time to first token, ms: median / largest, by streams",
        "itl_ms": "Time between streamed events, ms: median / largest, by streams",
    }
    for name, title in titles.items():
        rows = [
            [who, *(_value(one["levels"].get(count), name) for count in streams)]
            for who, one in contenders.items()
            if one["levels"] and (name == "tokens_per_s" or not _alone(who))
        ]
        if rows:
            lines += [f"{title}:", "", *_grid(["", *streams], rows), ""]
    ratios = _ratios(contenders, streams)
    lines += [*ratios, ""] if ratios else []
    for who, one in contenders.items():
        if one["errors"]:
            last = telling_line(one["errors"][-1])
            count = len(one["errors"])
            lines += [f"{who} gave no figures in {count} of {count + one['rounds']} rounds: "
                      f"`{last}`", ""]  # fmt: skip
    return lines


def replay_section(report: dict[str, Any]) -> list[str]:
    """Return the table of one run of `agent_replay.py`."""
    rows = []
    for who, one in report["contenders"].items():
        if "error" in one:
            rows.append([who, "-", "-", "-", "-", telling_line(one["error"])])
            continue
        rows.append(
            [
                who,
                f"{one['prompt_tokens']:,}",
                "-" if one["computed_tokens"] is None else f"{one['computed_tokens']:,}",
                f"{one['first_turn_ms']:,.0f}",
                f"{one['later_turns_ms']:,.0f}",
                f"{one['last_turn_ms']:,.0f}",
            ]
        )
    head = ["", "prompt tokens sent", "computed", "TTFT first turn", "median later", "last"]
    title = f"### Agent session of {report['turns']} turns, model: {report['model']}"
    return [title, "", f"`{report['command']}`. TTFT in ms.", "", *_grid(head, rows), ""]


def update_readme(readme: Path, results: Path) -> None:
    """Replaces what stands between the markers."""
    lines: list[str] = []
    for path in sorted([*results.glob("agent-*.json"), *results.glob("peers-*.json")]):
        report = json.loads(path.read_text())
        lines += replay_section(report) if "turns" in report else peers_section(report)
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text("\n".join([before + BEGIN, "", *lines, END]) + after)


if __name__ == "__main__":
    here = Path(__file__).parent
    update_readme(here / "results" / "runs.md", here / "results")

"""Draw `docs/speed.svg`, the README's chart, from `benchmarks/results`.

pip install matplotlib && python benchmarks/chart.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "speed.svg"
STREAMS = (1, 8, 32)
_COLOURS = {
    "quire": "#d9480f",
    "vllm-mlx": "#868e96",
    "mlx-vlm": "#adb5bd",
    "mlx_lm.server": "#ced4da",
    "vllm": "#868e96",
}
Series = dict[str, list[float]]


def over_http() -> Series:
    """Return tokens/s of each server over HTTP, by `STREAMS`, of a random model of 0.07M."""
    contenders = _read("peers-tiny.json")["contenders"]
    names = ("quire", "vllm-mlx", "mlx-vlm", "mlx_lm.server")
    return {
        name: [contenders[name]["levels"][str(count)]["tokens_per_s"] for count in STREAMS]
        for name in names
    }


def beside_vllm() -> Series:
    """Return tokens/s while all streams generate, by `STREAMS`, of Llama 3.1 8B in 4 bits on an
    H200, both engines in one lease.

    The quicker round of each counts.
    """
    rounds: dict[tuple[str, int], dict[str, Any]] = {}
    for row in _read("versus-h200.json")["rows"]:
        if row["shape"] != "llama-3.1-8b" or row["load"] != "bursts":
            continue
        key = row["system"], row["streams"]
        rounds[key] = min(rounds.get(key, row), row, key=lambda each: each["seconds"])
    return {
        name: [rounds[name, count]["tokens_s"] for count in STREAMS] for name in ("quire", "vllm")
    }


def draw(target: Path = TARGET) -> None:
    """Write the chart."""
    # The same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "quire", "font.size": 9, "svg.fonttype": "none"})
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
    titles = ("Llama 3.1 8B, 4 bits, one H200: engine", "Tiny Llama, 2 CPU cores: over HTTP")
    for panel, title, series in zip(panels, titles, (beside_vllm(), over_http()), strict=True):
        _bars(panel, series)
        panel.set_title(title, fontsize=9, loc="left")
    panels[0].set_ylabel("tokens/s")
    figure.savefig(target, metadata={"Date": None})


def _bars(panel: Any, series: Series) -> None:
    width = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        at = [index + (place - (len(series) - 1) / 2) * width for index in range(len(STREAMS))]
        bars = panel.bar(at, values, width, label=name, color=_COLOURS[name])
        panel.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=6, padding=1)
    panel.set_xticks(
        range(len(STREAMS)), [f"{count} stream{'s'[: count > 1]}" for count in STREAMS]
    )
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)


def _read(name: str) -> Any:
    return json.loads((HERE / "results" / name).read_text())


if __name__ == "__main__":
    draw()

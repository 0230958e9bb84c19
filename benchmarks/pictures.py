"""Held-out questions about pictures, one at a time and eight at once: who is right, how fast.

    python benchmarks/pictures.py --peers-python PEERS/bin/python [--items 20]

The embedded model's own skills, so that a wrong answer is the server's fault: every contender
serves the same weights, without those that hear, which peers do not load. Each question is asked
once, half of them in either way, so that no prefix cache has seen it. mlx_lm.server is left out: it
serves text only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from named_models import model_folder
from servers import SERVERS, Server, StartError, running

from quire.cli.load import Target
from quire.demo.skills import SkillAnswer, SkillItem, judge, load

HERE = Path(__file__).parent
SKILLS = HERE.parent / "tests" / "data" / "skills"
WAYS = (1, 8)
TIMEOUT_S = 120.0


def ask(target: Target, model: str, item: SkillItem) -> tuple[bool, float, str]:
    """Return whether the answer is right, after how many seconds it came, and the answer."""
    fields = {"model": model, "messages": item.messages, "temperature": 0, "max_tokens": 60}
    # vllm-mlx asks templates for thoughts unless told otherwise.
    fields["chat_template_kwargs"] = {"enable_thinking": False}
    started = time.perf_counter()
    connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(fields), headers)
        response = connection.getresponse()
        body = response.read()
    except OSError as error:
        return False, time.perf_counter() - started, str(error)
    finally:
        connection.close()
    seconds = time.perf_counter() - started
    if response.status != 200:
        return False, seconds, f"HTTP {response.status}: {body[:120]!r}"
    text = json.loads(body)["choices"][0]["message"]["content"] or ""
    return judge(item, SkillAnswer(text)), seconds, text


def measure(
    server: Server, folder: Path, peers_python: str, items: list[SkillItem]
) -> dict[str, Any]:
    """Measure one contender, by the number of questions at once. The first item only warms it
    up.
    """
    warm, *items = items
    rows: dict[str, Any] = {}
    try:
        with running(server, str(folder), peers_python) as (target, _):
            model = folder.name if server.package == "quire" else str(folder)
            ask(target, model, warm)
            for number, at_once in enumerate(WAYS):
                some = items[number :: len(WAYS)]
                started = time.perf_counter()
                with ThreadPoolExecutor(at_once) as pool:
                    got = list(pool.map(lambda item: ask(target, model, item), some))
                seconds = time.perf_counter() - started
                rows[str(at_once)] = {
                    "right": sum(right for right, _, _ in got),
                    "asked": len(some),
                    "seconds": round(seconds, 2),
                    "median_ms": round(median(each for _, each, _ in got) * 1e3),
                    "wrong": [text for right, _, text in got if not right][:5],
                }
    except StartError as error:
        rows["error"] = str(error).splitlines()[-1]
    return rows


def main() -> None:
    """Runs all contenders and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--items", type=int, default=20, help="of each of the six skills")
    parser.add_argument("--only", action="append", help="a contender's name; may be given again")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "pictures.json")
    args = parser.parse_args()
    items = [i for path in sorted(SKILLS.glob("picture_*.jsonl")) for i in load(path)[: args.items]]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="quire-model-") as scratch:
        folder = model_folder("demo", Path(scratch))
        for server in SERVERS:
            if server.package != "mlx-lm" and (not args.only or server.name in args.only):
                results[server.name] = measure(server, folder, args.peers_python, items)
                print(server.name, results[server.name], file=sys.stderr, flush=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print("|  | right, one at a time | ms | right, eight at once | ms | items/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, rows in results.items():
        if "error" in rows:
            print(f"| {name} | {rows['error']} |")
            continue
        one, many = (rows[str(way)] for way in WAYS)
        rate = many["asked"] / many["seconds"]
        print(
            f"| {name} | {one['right']} of {one['asked']} | {one['median_ms']} "
            f"| {many['right']} of {many['asked']} | {many['median_ms']} | {rate:.1f} |"
        )


if __name__ == "__main__":
    main()

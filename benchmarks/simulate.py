"""Plays a day of agent traffic against 1 to 1,000 replicas: `python -m benchmarks.simulate [OUT]`.

It says what each replica count answers, and what saturates beside the replicas: the router, the
ingress, the reports of cached blocks, the store of KV blocks. Costs of steps and of requests are
measured ones (`Costs`); the router's are measured here, with `PrefixTable` itself. Traffic is drawn
from published averages (`Traffic`). Each hour of the day is played for `--hour` seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.core.block_keys import SHORT
from quire.scale.routing import SPARE, PrefixTable, Route

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Result = dict[str, Any]
AWAY, THINKS, ROUTED, FETCHES, READS, GENERATES = range(6)
"""States of a session: gone, between turns, waits for the router, for blocks from the store, reads
its prompt, generates."""


@dataclass(frozen=True)
class Costs:
    """Costs of a replica and of the processes before it. Defaults are Gemma 4 26B-A4B in 4 bits on
    an H100 (`results/gpu-h100-2026-11-25-wide.json`, `gpu.md`), and the HTTP side
    (`results/runs.md`).

    Attributes:
        step_s: seconds of a step by the number of streams, between which it is linear.
        prompt_tokens_s: prompt tokens read in a second by a busy replica.
        kv_bytes: bytes of KV cache on a replica.
        token_bytes, session_bytes: KV bytes of a token, and of a session whatever its length
            (windows).
        streams: sequences that run at once.
        request_cpu_s, token_cpu_s: processor time of the ingress for a request and for a token.
        network_bytes_s: of a replica's network, by which blocks come from the store.
        store_bytes_s: of the whole store.
        event_bytes: of a streamed token.
    """

    step_s: tuple[tuple[int, float], ...] = (
        (1, 0.00215),
        (8, 0.00227),
        (32, 0.00465),
        (64, 0.00832),
    )
    prompt_tokens_s: float = 12_800.0
    kv_bytes: float = 40e9
    token_bytes: float = 20_480.0
    session_bytes: float = 210e6
    streams: int = 64
    request_cpu_s: float = 0.00092
    token_cpu_s: float = 35e-6
    network_bytes_s: float = 12.5e9
    store_bytes_s: float = 200e9
    event_bytes: float = 220.0


@dataclass(frozen=True)
class Traffic:
    """Sessions of agents. Averages of prompts and answers are those of the tool-and-agent trace of
    Mooncake (arXiv:2407.00079): 8,596 tokens of prompt, 182 of answer.

    Attributes:
        sessions: most active sessions a replica in the busiest hour.
        turns: requests of a session, on average.
        shared: tokens of the system prompt that all sessions of an application start with.
        added: new tokens of a turn (a tool's result), median, and the deviation of its logarithm.
        answer: the same of generated tokens.
        pause_s: the same of seconds between an answer and the next turn.
        applications: number of system prompts, of which some are far more frequent (Zipf).
        quiet: the quietest hour's share of the busiest hour's sessions.
    """

    sessions: float = 60.0
    turns: float = 12.0
    shared: int = 3000
    added: tuple[float, float] = (600.0, 0.8)
    answer: tuple[float, float] = (140.0, 0.7)
    pause_s: tuple[float, float] = (4.0, 1.0)
    applications: int = 20
    quiet: float = 0.25

    def share(self, hour: float) -> float:
        """Return the active share of the busiest hour's sessions: most at 15, fewest at 3."""
        wave = 0.5 - 0.5 * math.cos((hour - 3.0) / 24.0 * 2 * math.pi)
        return self.quiet + (1.0 - self.quiet) * wave


@dataclass(frozen=True)
class Setting:
    """Settings of a simulated day.

    Attributes:
        policy: "prefix" (`PrefixTable`'s rule: where it is cached, unless loaded) or "round-robin".
        store: whether evicted blocks, and those of other replicas, come from a shared store.
        routers: processes that route.
        route_s: seconds of the router for one request.
    """

    replicas: int
    policy: str = "prefix"
    store: bool = False
    routers: int = 1
    route_s: float = 0.0


_EVICT_S = 1.0
"""Seconds between two looks at the replicas' memory."""


def drawn(numbers: np.random.Generator, kind: tuple[float, float], count: int) -> Floats:
    """Return log-normal numbers of a median and a deviation of the logarithm."""
    median, deviation = kind
    return np.exp(numbers.normal(math.log(median), deviation, count))


class Day:
    """One day of one setting, in steps of `tick_s`. Sessions are rows of arrays."""

    def __init__(
        self, setting: Setting, costs: Costs, traffic: Traffic, tick_s: float, seed: int = 0
    ) -> None:
        self._setting, self._costs, self._traffic = setting, costs, traffic
        self._tick = tick_s
        self._numbers = np.random.default_rng(seed)
        rows = max(4, round(setting.replicas * traffic.sessions))
        self.state = np.full(rows, AWAY)
        self._home = np.full(rows, -1)
        self._application = np.zeros(rows, dtype=np.int64)
        self._context, self._answer, self._turns = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        self._written, self.cached = np.zeros(rows), np.zeros(rows)
        """Tokens that some replica has computed, and those that the last one still has."""
        self._fetched, self._left, self._wanted = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        """Bytes to fetch, tokens to read, and tokens to generate of the present request."""
        self._due, self._asked, self._used = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        self._has_shared = np.zeros((setting.replicas, traffic.applications), dtype=bool)
        self._next, self._credit, self.now, self._evicted_at = 0, 0.0, 0.0, 0.0
        self.counts: dict[str, float] = dict.fromkeys(
            ("requests", "prompt", "computed", "fetched", "generated", "finished"), 0.0
        )
        self.waits: list[float] = []
        """Seconds from each request to its first token."""

    def play(self, hour: float, seconds: float) -> None:
        """Play some seconds at an hour of the day."""
        wanted = round(len(self.state) * self._traffic.share(hour))
        for _ in range(max(1, round(seconds / self._tick))):
            self.now += self._tick
            self._arrive(wanted)
            self._ask()
            self._route()
            self._fetch()
            self._compute()
            if self.now - self._evicted_at >= _EVICT_S:
                self._evict()
                self._evicted_at = self.now
        self._evict()

    def _arrive(self, wanted: int) -> None:
        """Have sessions start until as many are active as the hour has."""
        away = np.flatnonzero(self.state == AWAY)
        count = min(len(away), wanted - (len(self.state) - len(away)))
        if count <= 0:
            return
        rows, numbers, traffic = away[:count], self._numbers, self._traffic
        self.state[rows], self._home[rows] = THINKS, -1
        self._application[rows] = np.minimum(numbers.zipf(1.5, count), traffic.applications) - 1
        self._context[rows], self._written[rows], self.cached[rows] = traffic.shared, 0.0, 0.0
        self._turns[rows] = numbers.geometric(1.0 / traffic.turns, count)
        self._due[rows] = self.now + numbers.uniform(0.0, 2 * traffic.pause_s[0], count)

    def _ask(self) -> None:
        rows = np.flatnonzero((self.state == THINKS) & (self._due <= self.now))
        self._context[rows] += drawn(self._numbers, self._traffic.added, len(rows))
        self._answer[rows] = drawn(self._numbers, self._traffic.answer, len(rows))
        self.state[rows], self._asked[rows] = ROUTED, self.now
        self.counts["requests"] += len(rows)
        self.counts["prompt"] += float(self._context[rows].sum())

    def _route(self) -> None:
        """Route as many requests as the routers have time for, the oldest first."""
        rows, setting = np.flatnonzero(self.state == ROUTED), self._setting
        if setting.route_s:
            most = setting.routers * self._tick / setting.route_s
            self._credit = min(self._credit + most, max(most, 1.0))
            rows = rows[np.argsort(self._asked[rows])][: int(self._credit)]
            self._credit -= len(rows)
        if not len(rows):
            return
        if setting.policy == "round-robin":
            chosen = (self._next + np.arange(len(rows))) % setting.replicas
            self._next += len(rows)
        else:
            # New conversations, and those whose home is loaded, go where there is the least to do.
            busy = np.bincount(self._home[self.state > ROUTED], minlength=setting.replicas)
            home = self._home[rows]
            leaves = (home < 0) | (busy[home] > 2 * busy.min() + SPARE)
            idle = np.argsort(busy + self._numbers.random(setting.replicas))
            chosen = home.copy()
            chosen[leaves] = idle[np.arange(int(leaves.sum())) % setting.replicas]
        self._place(rows, chosen)

    def _place(self, rows: Rows, chosen: Rows) -> None:
        """Give requests to replicas: what is cached there, or in the store, is not computed."""
        traffic = self._traffic
        shared = self._has_shared[chosen, self._application[rows]] * float(traffic.shared)
        own = np.where(self._home[rows] == chosen, self.cached[rows], 0.0)
        here = np.maximum(own, shared)
        stored = np.maximum(self._written[rows] - here, 0.0) if self._setting.store else 0.0 * here
        self._home[rows], self._used[rows] = chosen, self.now
        self._left[rows] = np.maximum(self._context[rows] - here - stored, 1.0)
        moved_bytes = stored * self._costs.token_bytes
        self._fetched[rows] = moved_bytes + self._costs.session_bytes * (stored > 0)
        self.state[rows] = np.where(stored > 0, FETCHES, READS)
        self._has_shared[chosen, self._application[rows]] = True
        self.counts["computed"] += float(self._left[rows].sum())
        self.counts["fetched"] += float(self._fetched[rows].sum())

    def _fetch(self) -> None:
        """Advance what comes from the store: each replica by its network, all by the store."""
        rows = np.flatnonzero(self.state == FETCHES)
        if not len(rows):
            return
        beside = np.bincount(self._home[rows], minlength=self._setting.replicas)
        rate = self._costs.network_bytes_s / beside[self._home[rows]]
        rate *= min(1.0, self._costs.store_bytes_s / float(rate.sum()))
        self._fetched[rows] -= rate * self._tick
        self.state[rows[self._fetched[rows] <= 0]] = READS

    def _compute(self) -> None:
        """Have each replica read prompts, one after the other, and generate, by turns if both."""
        costs, count = self._costs, self._setting.replicas
        reading = np.flatnonzero(self.state == READS)
        writing = np.flatnonzero(self.state == GENERATES)
        reads = np.bincount(self._home[reading], minlength=count) > 0
        streams = np.bincount(self._home[writing], minlength=count)
        share = np.where(reads & (streams > 0), 0.5, 1.0) * self._tick
        self._write(writing, streams, share)
        if not len(reading):
            return
        reading = reading[np.lexsort((self._asked[reading], self._home[reading]))]
        homes = self._home[reading]
        ends = np.cumsum(self._left[reading])
        first = np.searchsorted(homes, homes)  # of the replica's own requests
        before = ends - self._left[reading] - (ends - self._left[reading])[first]
        room = np.maximum(costs.prompt_tokens_s * share[homes] - before, 0.0)
        self._left[reading] -= np.minimum(self._left[reading], room)
        place = np.arange(len(reading)) - first
        ready = reading[(self._left[reading] <= 0) & (streams[homes] + place < costs.streams)]
        self.state[ready], self._wanted[ready] = GENERATES, self._answer[ready]
        self.waits += (self.now - self._asked[ready]).tolist()

    def _write(self, rows: Rows, streams: Rows, share: Floats) -> None:
        numbers, seconds = zip(*self._costs.step_s, strict=True)
        steps = np.interp(streams, numbers, seconds)[self._home[rows]]
        made = np.minimum(share[self._home[rows]] / steps, self._wanted[rows])
        self._wanted[rows] -= made
        self.counts["generated"] += float(made.sum())
        done = rows[self._wanted[rows] <= 1e-9]
        self.counts["finished"] += len(done)
        self._context[done] += self._answer[done]
        self._written[done] = self.cached[done] = self._context[done]
        self._turns[done] -= 1
        self.state[done] = np.where(self._turns[done] <= 0, AWAY, THINKS)
        self._due[done] = self.now + drawn(self._numbers, self._traffic.pause_s, len(done))

    def _evict(self) -> None:
        """Evict the sessions that were used least recently where they exceed a replica's memory."""
        kept = np.flatnonzero((self._home >= 0) & (self.cached > 0))
        if not len(kept):
            return
        kept = kept[np.lexsort((-self._used[kept], self._home[kept]))]
        held = np.cumsum(self.cached[kept] * self._costs.token_bytes + self._costs.session_bytes)
        first = np.searchsorted(self._home[kept], self._home[kept])
        before = np.where(first > 0, held[first - 1], 0.0)
        gone = kept[held - before > self._costs.kv_bytes]
        self.cached[gone[self.state[gone] <= THINKS]] = 0.0

    def held_tokens(self) -> float:
        """Return the cached tokens of all replicas."""
        return float(self.cached.sum())


def route_seconds(replicas: int) -> tuple[float, float]:
    """Measure `PrefixTable`: processor seconds for a request, and for a reported block.

    A prompt has 150 blocks of 64 tokens, and every replica has cached its first 46, the system
    prompt; one has all of it.
    """
    table, names = PrefixTable(), [f"replica-{number}" for number in range(replicas)]
    table.keep(names)
    keys = [number.to_bytes(SHORT, "little") for number in range(10_000)]
    started = time.process_time()
    for name in names[:5]:
        table.report(name, b"".join(keys))
    report_s = (time.process_time() - started) / (len(keys) * len(names[:5]))
    for name in names[1:]:
        table.report(name, b"".join(keys[:46]))
    loads, route = dict.fromkeys(names, 3), Route(b"".join(keys[:150]))
    started, count = time.process_time(), max(5, 500 // replicas)
    for _ in range(count):
        table.routed(route, table.ranked(route, loads)[0])
    return (time.process_time() - started) / count, report_s


def run(setting: Setting, costs: Costs, traffic: Traffic, hour_s: float, tick_s: float) -> Result:
    """Play a day and return its figures: of the busiest hour, unless they say otherwise."""
    route_s, report_s = route_seconds(setting.replicas)
    day = Day(replace(setting, route_s=route_s), costs, traffic, tick_s)
    day.play(0.0, max(hour_s, 30.0))  # nothing is cached at first
    hours = []
    for hour in range(24):
        before, answered = dict(day.counts), len(day.waits)
        day.play(hour, hour_s)
        counts = {name: each - before[name] for name, each in day.counts.items()}
        hours.append((counts, sorted(day.waits[answered:])))
    counts, waits = max(hours, key=lambda each: each[0]["generated"])
    rates = {name: each / hour_s for name, each in counts.items()}
    prompt = sum(each["prompt"] for each, _ in hours)
    computed = sum(each["computed"] for each, _ in hours)
    reported = day.held_tokens() / 64  # blocks, once a second each
    cpu_s = rates["requests"] * costs.request_cpu_s + rates["generated"] * costs.token_cpu_s
    return {
        **asdict(setting),
        "requests_s": round(rates["requests"], 1),
        "finished_s": round(rates["finished"], 1),
        "tokens_s": round(rates["generated"]),
        "hit_rate_day": round(1 - computed / max(prompt, 1.0), 3),
        "first_token_s": {
            name: round(waits[int(share * (len(waits) - 1))], 2) if waits else None
            for name, share in (("p50", 0.5), ("p95", 0.95))
        },
        "router_use": round(rates["requests"] * route_s / setting.routers, 3),
        "report_use": round(reported * report_s, 3),
        "report_mb_s": round(reported * SHORT / 1e6, 2),
        "ingress_cores": round(cpu_s, 2),
        "stream_mb_s": round(rates["generated"] * costs.event_bytes / 1e6, 2),
        "store_use": round(rates["fetched"] / costs.store_bytes_s, 3),
        "route_us": round(route_s * 1e6),
    }


COUNTS = (1, 3, 10, 30, 100, 300, 1000)
_MOST_BY_TURNS = 100
"""Most replicas for which round-robin is played: what it costs is clear by then."""


def main(asked: argparse.Namespace) -> None:
    """Play all settings; print a line of each."""
    results: list[Result] = []
    for replicas in asked.replicas:
        ways = [("prefix", False), ("prefix", True)]
        if replicas <= _MOST_BY_TURNS:
            ways.append(("round-robin", False))
        for policy, store in ways:
            setting = Setting(replicas, policy, store, asked.routers)
            found = run(setting, Costs(), Traffic(), asked.hour, asked.tick)
            results.append(found)
            print(json.dumps(found), flush=True)
    if asked.out is not None:
        made = {"costs": asdict(Costs()), "traffic": asdict(Traffic()), "runs": results}
        asked.out.write_text(json.dumps(made, indent=1) + "\n")


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", help="a file for the figures")
    parser.add_argument("--replicas", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--hour", type=float, default=6.0, help="seconds played of each hour")
    parser.add_argument("--tick", type=float, default=0.2, help="seconds of a step")
    parser.add_argument("--routers", type=int, default=1, help="processes that route")
    return parser.parse_args(words)


if __name__ == "__main__":
    main(parsed())

"""Ordinary load and attacks together: nothing is wrong, nothing is lost, nothing grows.

`QUIRE_SOAK_S` says for how many seconds; 20 minutes by default.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.soak.attacks import ATTACKS, ENGINE_TIMEOUT_S, Target
from tests.soak.load import Mix, cancel, finish, malformed
from tests.support.child import Child, quire_serve

SECONDS = float(os.environ.get("QUIRE_SOAK_S", "1200"))
WARM_UP_S = min(60.0, SECONDS / 4)
CONCURRENCY = 8
ATTACKERS = 2
_PAUSE_S = 0.3  # between two attempts of one attacker
_MIB = 1 << 20
MEMORY = 48 * _MIB
"""Bytes that the processes may have grown by: allocators keep what was freed."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(int(SECONDS) + 900)]


@dataclass
class Soaked:
    """Answers and faults that ordinary clients and attackers got."""

    done: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


async def known(client: httpx.AsyncClient, target: Target, number: int) -> str:
    """Return a greedy answer, which depends on nothing but its prompt."""
    message = {"role": "user", "content": f"Repeat this text. {number} red cats, green hill"}
    body = {"model": target.model, "messages": [message], "temperature": 0, "max_tokens": 12}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def ordinary(target: Target, seconds: float, seed: int, soaked: Soaked) -> None:
    """Clients of all kinds, until the time is over."""
    mix, end = Mix(target.model, seed), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=target.url, timeout=300) as client:
        expected = [await known(client, target, number) for number in range(5)]

        async def worker() -> None:
            while time.monotonic() < end:
                kind = mix.draw.choices(("finish", "known", "cancel", "malformed"), (5, 3, 1, 1))[0]
                route, body = mix.request()
                if kind == "finish":
                    await finish(client, route, body)
                elif kind == "known":
                    number = mix.draw.randrange(len(expected))
                    got = await known(client, target, number)
                    assert got == expected[number], f"{got!r} in the place of {expected[number]!r}"
                elif kind == "cancel":
                    await cancel(client, route, body, mix.draw.uniform(0.0, 0.3))
                else:
                    await malformed(client, mix)
                soaked.done[kind] += 1

        results = await asyncio.gather(
            *(worker() for _ in range(CONCURRENCY)), return_exceptions=True
        )
    soaked.faults += [f"client: {fault!r}" for fault in results if fault is not None]


def attack(target: Target, over: threading.Event, seed: int, soaked: Soaked) -> None:
    """One attacker, until the ordinary load has ended."""
    draw = random.Random(seed)
    while not over.wait(_PAUSE_S):
        attempt = draw.choice(ATTACKS)
        name = attempt.__name__
        try:
            status = attempt(target, draw)
        except (httpx.TransportError, OSError):
            soaked.attempts[f"{name} cut off"] += 1  # the server may close on an attacker
            continue
        except Exception as error:  # of the attack itself, which would go on no more
            soaked.faults.append(f"{name}: {error!r}")
            return
        soaked.attempts[f"{name} {status}"] += 1
        if status is not None and status >= 500 and status != 503:
            soaked.faults.append(f"{name}: {status}")


def soak(target: Target, seconds: float, seed: int) -> Soaked:
    """Run well-behaved and hostile clients at once; return what was seen."""
    soaked, over = Soaked(), threading.Event()
    attackers = [
        threading.Thread(target=attack, args=(target, over, seed + number, soaked))
        for number in range(ATTACKERS)
    ]
    for attacker in attackers:
        attacker.start()
    try:
        asyncio.run(ordinary(target, seconds, seed, soaked))
    finally:
        over.set()
        for attacker in attackers:
            attacker.join(180)
    return soaked


def settled(child: Child) -> dict[str, int]:
    """Wait until nothing is in flight and abandoned connections are closed; return what is held."""
    child.wait_idle()
    now = child.held()
    for _ in range(20):
        time.sleep(0.5)
        before, now = now, child.held()
        if now["descriptors"] >= before["descriptors"] and now["memory"] >= before["memory"]:
            break
    return now


def test_nothing_is_wrong_or_lost_and_nothing_grows(tmp_path: Path) -> None:
    # The embedded model, which sees images.
    options = ("--kv-memory", "64MB", "--engine-timeout", str(ENGINE_TIMEOUT_S))
    with quire_serve(tmp_path, *options) as child:
        name = httpx.get(f"{child.url}/v1/models", timeout=30).json()["data"][0]["id"]
        target = Target(child.url, name, child.engine.pid)
        # Thread pools, caches, allocator arenas and the page pools grow to their size first.
        warm = soak(target, WARM_UP_S, seed=1)
        assert not warm.faults, (warm, _end_of(child.log))
        before = settled(child)
        soaked = soak(target, SECONDS - WARM_UP_S, seed=100)
        assert not soaked.faults, (soaked, _end_of(child.log))
        after = settled(child)
        print(f"{dict(soaked.done)}\n{dict(soaked.attempts)}\nbefore {before}\nafter {after}")
        assert soaked.done["known"] > 0
        assert soaked.done["finish"] > 0
        tried = {name.split()[0] for name in (warm.attempts + soaked.attempts)}
        assert tried == {each.__name__ for each in ATTACKS}
        assert after["processes"] == before["processes"]
        assert after["threads"] <= before["threads"] + 4
        assert after["descriptors"] <= before["descriptors"] + 8
        assert after["memory"] - before["memory"] < MEMORY


def _end_of(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text()[-2000:]
    return ""

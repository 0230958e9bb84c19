"""The disk tier under the real engine: what comes back from disk changes no answer."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest

from quire.cache.blocks import PoolKey
from quire.cache.disk_tier import DiskTier
from quire.cache.disk_transfer import matches_pool
from quire.cache.disk_usage import usage
from quire.core.config import DiskConfig, EngineConfig
from quire.core.errors import ModelError
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.engine.assembly import assemble
from quire.models.weights.loader import LoadedModel, open_model
from quire.serving.engine_client import ProcessEngine
from tests.support.everyday import everyday
from tests.support.opened import Open, opener
from tests.support.parity import Company, Generated, alone, assert_same, executor_of, prompts
from tests.support.tiny_models import tiny_model
from tests.support.waiting import HANG_S

PLAIN, PAGE4 = KVFormat(), KVFormat("page", 4, 4, skip_layers=(1,))
UNIFORM8, TURBO = KVFormat("uniform", 8, 8, 32), KVFormat("turbo", 3.5, 3.5)
HALF, PAGE8 = KVFormat(dtype="bfloat16"), KVFormat("page", 8, 8)
FAMILIES = ("llama", "gemma4", "gemma4_ple", "qwen3", "qwen3_5")
CASES = [(family, PLAIN) for family in FAMILIES]
CASES += [(family, PAGE4) for family in FAMILIES[:4]]
CASES += [("gemma4", UNIFORM8), ("gemma4", TURBO), ("gemma4", HALF)]
# Where a recurrent state shapes the keys, cutting a prompt elsewhere shifts them by 1e-6, and now
# and then a coarse code with them: with or without a disk. Fine codes stay within the tolerance.
CASES += [("qwen3_5", PAGE8)]
DAILY = (("llama", PAGE4), ("qwen3_5", PAGE8))

LONG = prompts((300,), tokens=12)[0]
OTHER = prompts((200,), seed=9)[0].prompt
LATER = [
    replace(LONG, id="repeated"),
    replace(LONG, id="extended", prompt=LONG.prompt + OTHER[:30]),
    replace(LONG, id="parted", prompt=LONG.prompt[:230] + OTHER[:40]),
    replace(LONG, id="new", prompt=OTHER[:70]),
]

Opened = tuple[LoadedModel, EngineConfig]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(tmp_path_factory)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine gives nothing up."""
    monkeypatch.setattr("quire.cache.disk_prefetch._MIN_TIMEOUT_S", HANG_S)
    monkeypatch.setattr("quire.serving.engine_client._GRACE_S", HANG_S)
    monkeypatch.setattr(DiskTier, "close", partialmethod(DiskTier.close, HANG_S))


def config(folder: Path, format: KVFormat = PLAIN, memory: int = 64 << 20) -> EngineConfig:
    disk = DiskConfig(str(folder), 64 << 20)
    return EngineConfig("", kv_memory=memory, kv_format=format, disk=disk)


def company(loaded: LoadedModel, config: EngineConfig) -> Company:
    """Return an engine whose disk tier is open, so that the test does not depend on who is
    quicker.
    """
    company = Company(loaded, config)
    disk = company.engine._disk
    assert disk is not None
    assert disk.drain(HANG_S)
    disk.seconds = lambda size: 0.0  # type: ignore[method-assign]
    return company


def disk_counts(company: Company) -> dict[str, int]:
    return dict(company.engine.stats().disk)


def expected(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request]
) -> dict[str, Generated]:
    return alone(loaded, replace(config, disk=None), wanted)


def cached(company: Company, name: str) -> int:
    return company.answers[name].ends[0].cached_tokens


@pytest.mark.parametrize(
    ("family", "format"),
    everyday(CASES, lambda *case: case in DAILY),
    ids=[f"{family} {format.name}" for family, format in CASES],
)
def test_after_a_restart(
    opened: Callable[[str], LoadedModel], tmp_path: Path, family: str, format: KVFormat
) -> None:
    loaded, settings = opened(family), config(tmp_path, format)
    first = company(loaded, settings)
    first.run([LONG])
    first.engine.close()
    second = company(loaded, settings)
    got = second.run(LATER)
    assert_same(got, expected(loaded, settings, LATER), [request.id for request in LATER])
    # A recurrent state is on disk at the end of the prompt's last full page only.
    parted = 0 if family == "qwen3_5" else 192
    reused = {request.id: cached(second, request.id) for request in LATER}
    assert reused["repeated"] >= 256
    assert reused["extended"] >= 256
    assert reused["parted"] >= parted
    assert reused["new"] == 0
    ends = {request.id: second.answers[request.id].ends[0] for request in LATER}
    assert ends["repeated"].reuse == "evicted", "the disk keeps whole blocks only"
    assert ends["new"].reuse == "new"
    assert disk_counts(second)["hits"] > 0
    assert disk_counts(second)["misses"] == 0
    stats = second.engine.stats()
    assert stats.cached_tokens == sum(reused.values())
    second.engine.close()


@pytest.mark.parametrize(
    ("family", "format"),
    [
        pytest.param("llama", PLAIN, marks=pytest.mark.slow),
        pytest.param("gemma4", PAGE8, marks=pytest.mark.slow),
        pytest.param("qwen3_5", PLAIN),
        pytest.param("llama", PAGE8, marks=pytest.mark.slow),
        pytest.param("gemma4", PLAIN, marks=pytest.mark.slow),
        pytest.param("qwen3_5", PAGE8, marks=pytest.mark.slow),
    ],
)
def test_evicted_and_read_back(
    opened: Callable[[str], LoadedModel], tmp_path: Path, family: str, format: KVFormat
) -> None:
    loaded = opened(family)
    settings = replace(config(tmp_path, format), disk=None)
    memory = 2 * assemble(loaded, settings)._scheduler.limits.worst_case_bytes(format, 400)
    settings = config(tmp_path, format, memory)
    crowd = [
        replace(request, id=f"crowd{number}", max_tokens=4)
        for number, request in enumerate(prompts((300,) * 4, seed=3))
    ]
    wanted = replace(LONG, id="again")
    all_ = company(loaded, settings)
    assert all_.engine._disk is not None
    all_.run([LONG])
    for request in crowd:
        all_.run([request])
    assert all_.engine._disk.drain(HANG_S)
    all_.run([wanted])
    names = [LONG.id, "again", *(request.id for request in crowd)]
    assert_same(all_.answers, expected(loaded, settings, [LONG, wanted, *crowd]), names)
    assert cached(all_, "again") >= 256
    assert disk_counts(all_)["hits"] > 0
    all_.engine.close()


def test_flipped_bits_are_computed_anew(
    opened: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    loaded, settings = opened("gemma4"), config(tmp_path)
    first = company(loaded, settings)
    first.run([LONG])
    first.engine.close()
    path = tmp_path / "pages.sqlite"
    raw = bytearray(path.read_bytes())
    rng = random.Random(4)
    for _ in range(60):
        raw[rng.randrange(3 * 16384, len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    second = company(loaded, settings)
    got = second.run(LATER)
    assert_same(got, expected(loaded, settings, LATER), [request.id for request in LATER])
    assert cached(second, "repeated") < 256
    second.engine.close()


def test_another_models_folder(opened: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    first = company(opened("llama"), config(tmp_path / "kv"))
    first.run([LONG])
    first.engine.close()
    other = open_model(str(tiny_model(tmp_path / "model", "llama", seed=1)), dtype="float32")
    second = company(other, config(tmp_path / "kv"))
    got = second.run([LATER[0]])
    assert_same(got, expected(other, config(tmp_path), [LATER[0]]), ["repeated"])
    assert cached(second, "repeated") == 0
    second.engine.close()


def test_a_folder_that_cannot_be_used_ends_the_start(
    opened: Callable[[str], LoadedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, settings = opened("llama"), config(tmp_path)
    first = company(loaded, settings)
    first.run([LONG])
    with pytest.raises(ModelError, match=f"^kv_disk: {tmp_path} is in use by process"):
        company(loaded, settings)
    first.engine.close()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ModelError, match=f"^kv_disk: {tmp_path}/file: File exists$"):
        company(loaded, config(tmp_path / "file"))
    assert "disabled" not in caplog.text  # the error says it
    third = company(loaded, settings)
    third.run([LATER[0]])
    assert cached(third, "repeated") >= 256
    third.engine.close()


def test_the_folder_vanishes(
    opened: Callable[[str], LoadedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, settings = opened("llama"), config(tmp_path / "kv")
    first = company(loaded, settings)
    first.run([LONG])
    first.engine.close()
    second = company(loaded, settings)
    shutil.rmtree(tmp_path / "kv")
    with caplog.at_level(logging.WARNING):
        got = second.run(LATER)
    assert_same(got, expected(loaded, settings, LATER), [request.id for request in LATER])
    assert caplog.text.count("deleted while in use") == 1
    second.engine.close()


def test_an_abort_while_reading(opened: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    loaded, settings = opened("llama"), config(tmp_path)
    first = company(loaded, settings)
    first.run([LONG])
    first.engine.close()
    second = company(loaded, settings)
    second.add(LATER[0])
    second.engine.step()
    second.engine.abort("repeated")
    second.run([LATER[1]])
    assert [end.finish for end in second.answers["repeated"].ends] == ["abort"]
    assert_same(second.answers, expected(loaded, settings, [LATER[1]]), ["extended"])
    second.engine.close()


def test_a_limit_too_small_is_refused(opened: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    settings = replace(config(tmp_path), disk=DiskConfig(str(tmp_path), 1000))
    with pytest.raises(ModelError, match="kv_disk_size"):
        assemble(opened("llama"), settings)


def test_contents_of_another_shape_do_not_fit(
    opened: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    """Whatever wrote them: a page is only taken if it is laid out as ours are."""
    engine = company(opened("gemma4"), config(tmp_path))
    engine.run([LONG])
    pools = executor_of(engine.engine).pools
    pool = PoolKey(0, PLAIN)
    heads, dim = 2, 16
    right = np.zeros((heads, 64, dim), np.float32)
    layers = 2
    assert matches_pool(pools, pool, (("float32", right),) * 2 * layers)
    assert not matches_pool(pools, pool, (("float32", right),) * layers)
    assert not matches_pool(pools, pool, (("float32", right[:1]),) * 2 * layers)
    assert not matches_pool(pools, pool, (("float16", right.astype(np.float16)),) * 2 * layers)
    engine.engine.close()


async def test_a_process_that_ends_leaves_its_blocks(tmp_path: Path) -> None:
    """Blocks that were cached in memory only go to disk when the server stops."""
    model = tiny_model(tmp_path / "model", "gemma4")
    settings = replace(config(tmp_path / "kv"), model=str(model))
    cached = []
    for number in range(2):
        engine = await ProcessEngine.start(settings, "warning")
        (ticket,) = engine.submit([replace(LONG, id=f"r{number}")])
        outputs = [output async for output in ticket]
        cached.append(outputs[-1].cached_tokens)
        await engine.close()
    assert cached == [0, 256]
    assert usage(tmp_path / "kv")[0].blocks > 4


def test_a_new_replica_reads_what_another_has_written(opened: Open, tmp_path: Path) -> None:
    """The first has evicted the prompt, and goes on."""
    loaded = opened("llama")
    settings = [
        replace(config(tmp_path), disk=DiskConfig(str(tmp_path / name), 64 << 20, neighbours=True))
        for name in ("replica-0", "replica-1")
    ]
    first = company(loaded, settings[0])
    first.run([LONG])
    first.engine._scheduler.manager.spill_kept()
    first.run([replace(LATER[-1], id="next")])  # whose plan carries the blocks out
    assert first.engine._disk is not None
    assert first.engine._disk.drain(HANG_S)
    second = company(loaded, settings[1])
    got = second.run(LATER[:2])
    names = [request.id for request in LATER[:2]]
    assert_same(got, expected(loaded, settings[1], LATER[:2]), names)
    assert min(cached(second, name) for name in names) >= 256
    first.engine.close()
    second.engine.close()

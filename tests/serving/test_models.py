"""Loading and eviction of models, with models that a test opens and closes by hand."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from functools import cache

import pytest

from quire.core.config import EngineConfig, ModelConfig, ServerConfig
from quire.core.errors import EngineFailure, ModelError, NoRoom, NotFound
from quire.core.info import ModelInfo
from quire.core.messages import ChangeAdapter, Progress
from quire.demo import MODEL_DIR
from quire.serving.adapters import change_adapter
from quire.serving.assembly import assemble
from quire.serving.engine_client import MakeRoom
from quire.serving.model import Lease, Loaded, Model
from quire.serving.models import Models, OnProgress
from quire.serving.restarts import WITHIN_S
from quire.serving.swaps import CLOSED_S, OPEN_S
from quire.text.tokenizer import Tokenizer
from tests.support import virtual_time
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.waiting import HANG_S

LOAD_S = 5.0


@cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer that all loaded models share."""
    return Tokenizer.open(MODEL_DIR)


@dataclass
class House:
    """Loads models for a machine that has room for `room` of them."""

    room: int = 2
    loads: list[str] = field(default_factory=list)
    there: dict[str, Loaded] = field(default_factory=dict)
    configs: list[EngineConfig] = field(default_factory=list)
    problem: str | None = None
    load_s: float = LOAD_S
    started: list[str] = field(default_factory=list)
    asks: bool = True

    async def open(
        self, model_config: ModelConfig, on_progress: OnProgress, make_room: MakeRoom
    ) -> Loaded:
        self.started.append(model_config.name)
        self.configs.append(model_config.engine)
        while self.asks and len(self.there) >= self.room:
            await asyncio.sleep(self.load_s)
            self.configs.append(await make_room(NoRoom("full")))
        on_progress(Progress("weights", 1, 4))
        full = len(self.there) >= self.room  # an engine is told at its start what there is
        await asyncio.sleep(self.load_s)
        if self.problem is not None:
            raise ModelError(self.problem)
        if full:
            raise NoRoom("full")
        self.loads.append(model_config.name)
        info = ModelInfo(str(MODEL_DIR), "gemma4", 4096, 4096, "float32", "cpu", 5096)
        engine = ScriptedEngine(info, lambda _: Script())
        close = engine.close

        async def closed() -> None:
            del self.there[model_config.name]
            await close()

        engine.close = closed  # type: ignore[method-assign]
        service = assemble(engine, model_config.name, model_config.serving, tokenizer())
        self.there[model_config.name] = Loaded(service, broken=asyncio.Event())
        return self.there[model_config.name]

    def models(
        self,
        *names: str,
        pinned: str = "",
        idle_s: float | None = None,
        memory: int | None = None,
        restarts: int = 5,
    ) -> Models:
        model_configs = [
            ModelConfig(EngineConfig(name), ServerConfig(served_name=name), name == pinned, idle_s)
            for name in names
        ]
        return Models(model_configs, self.open, memory=memory, restarts=restarts)


async def asked(models: Models, name: str) -> Lease:
    return await models.use(models.find(name))


async def answered(models: Models, name: str) -> None:
    (await asked(models, name)).release()


def states(models: Models) -> list[str]:
    return [model.state for model in models]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_concurrent_requests_load_a_model_once(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        house = House()
        models = house.models("a", "b")
        await models.open()
        assert states(models) == ["unloaded", "unloaded"]
        leases = await asyncio.gather(*(asked(models, "b") for _ in range(3)))
        assert house.loads == ["b"]
        assert models.find("b").users == 3
        assert len({id(lease.loaded) for lease in leases}) == 1
        assert states(models) == ["unloaded", "loaded"]
        await models.close()
        assert not house.there

    with caplog.at_level(logging.INFO, "quire.models"):
        virtual_time.run(check())
    assert caplog.messages == [f"loaded b in {LOAD_S:.1f} s"]


def test_a_cancelled_request_does_not_stop_a_shared_load() -> None:
    async def check() -> None:
        models = House().models("a", "b")
        leaving, staying = (asyncio.create_task(asked(models, "a")) for _ in range(2))
        await asyncio.sleep(LOAD_S / 2)
        leaving.cancel()
        assert (await staying).model.users == 1

    virtual_time.run(check())


def test_an_unknown_name_is_not_served_and_none_is_the_first() -> None:
    models = House().models("a", "b")
    assert models.find(None) is models.default
    assert models.find("b:latest") is models.find("b")
    with pytest.raises(NotFound, match=r"'c' is not served here; 'a', 'b' are"):
        models.find("c")


def test_the_least_recently_used_makes_room_and_a_pinned_one_stays() -> None:
    async def check() -> None:
        house = House(room=3)
        models = house.models("a", "b", "c", "d", pinned="a")
        await models.open()
        assert states(models) == ["loaded", "unloaded", "unloaded", "unloaded"]
        for name in "bcb":
            await answered(models, name)
            await asyncio.sleep(1)
        await answered(models, "d")  # c was used before b; a even before, but is pinned
        assert states(models) == ["loaded", "loaded", "unloaded", "loaded"]
        await answered(models, "c")
        assert states(models) == ["loaded", "unloaded", "loaded", "loaded"]

    virtual_time.run(check())


def test_one_in_use_makes_room_when_it_is_done_though_others_ask_for_it_meanwhile() -> None:
    """The busy model takes requests for a while, then none until it is empty, and so on."""

    async def check() -> None:
        house = House(room=1)
        models = house.models("a", "b")
        lease = await asked(models, "a")
        other = asyncio.create_task(asked(models, "b"))
        await asyncio.sleep(LOAD_S + 1)  # by now it is known that there is no room
        assert states(models) == ["loaded", "loading"]
        await answered(models, "a")
        await asyncio.sleep(OPEN_S[0] + LOAD_S)
        assert states(models) == ["unloading", "loading"]
        again = asyncio.create_task(asked(models, "a"))
        await asyncio.sleep(1)
        assert not again.done()
        await asyncio.sleep(CLOSED_S)
        (await again).release()  # a long answer does not shut it for all
        assert not other.done()
        lease.release()
        (await other).release()
        await answered(models, "a")
        assert house.loads == ["a", "b", "a"]

    virtual_time.run(check())


def test_nothing_is_evicted_once_nobody_waits() -> None:
    async def check() -> None:
        house = House(room=1)
        models = house.models("a", "b")
        lease = await asked(models, "a")
        for seconds in (1, LOAD_S + 1, 2 * LOAD_S + OPEN_S[0] + 1):  # loading, open, closed
            leaving = asyncio.create_task(asked(models, "b"))
            await asyncio.sleep(seconds)
            leaving.cancel()
            await asyncio.sleep(LOAD_S + 1)
            assert states(models) == ["loaded", "unloaded"]
            await answered(models, "a")
        lease.release()
        await asyncio.sleep(1000)
        assert states(models) == ["loaded", "unloaded"]
        assert house.loads == ["a"]

    virtual_time.run(check())


@pytest.mark.slow
def test_swaps_cost_the_key_that_asks_for_them() -> None:
    """A key that alternates leaves the others most of the time; alone, it alternates freely."""

    async def check() -> None:
        house = House(room=1, load_s=1.0)
        models = house.models("a", "b")

        async def alternates(key: str) -> None:
            while True:
                for name in "ba":
                    (await models.use(models.find(name), key)).release()

        waited = []
        attacker = asyncio.create_task(alternates("bad"))
        await asyncio.sleep(100)
        alone = len(house.loads)
        assert alone > 20
        for _ in range(200):
            await asyncio.sleep(1)
            before = now()
            (await models.use(models.find("a"), "good")).release()
            waited.append(now() - before)
        attacker.cancel()
        await models.close()
        assert len(house.loads) - alone < 60  # instead of 100
        assert sum(waited) < 0.3 * 200
        assert sorted(waited)[len(waited) // 2] == 0

    virtual_time.run(check())


@pytest.mark.parametrize("asks", [True, False])
def test_a_swap_starts_one_engine_that_asks_for_room(asks: bool) -> None:
    """An engine that learns too late that it needs more is started again."""

    async def check() -> None:
        house = House(room=1, asks=asks)
        models = house.models("a", "b")
        await answered(models, "a")
        await answered(models, "b")
        assert house.loads == ["a", "b"]
        assert house.started == (["a", "b"] if asks else ["a", "b", "b"])
        assert states(models) == ["unloaded", "loaded"]

    virtual_time.run(check())


def test_an_engine_that_has_to_wait_for_room_is_started_once_and_holds_up_no_other() -> None:
    """A stream keeps its model for minutes; another model is loaded and unloaded meanwhile."""

    async def check() -> None:
        house = House(room=2)
        models = house.models("a", "b", "c", pinned="c")
        held = await asked(models, "a")
        waiting = asyncio.create_task(answered(models, "b"))
        await answered(models, "c")  # which leaves no room for "b"
        assert house.started == ["a", "b", "c"] or house.started == ["a", "c", "b"]
        await asyncio.sleep(300)
        assert not waiting.done()
        await models.unload(models.find("c"))
        await waiting
        held.release()
        assert sorted(house.started) == ["a", "b", "c"]
        assert states(models) == ["loaded", "loaded", "unloaded"]

    virtual_time.run(check())


def test_where_nothing_can_go_the_request_is_told_so() -> None:
    async def check() -> None:
        models = House(room=1).models("a", "b", pinned="a")
        await models.open()
        with pytest.raises(EngineFailure, match="'b' could not be loaded: full"):
            await asked(models, "b")
        assert models.find("b").problem == "full"
        assert states(models) == ["loaded", "failed"]

    virtual_time.run(check())


def test_a_model_that_cannot_be_opened_is_tried_again_by_the_next_request() -> None:
    async def check() -> None:
        house = House(problem="no config.json")
        models = house.models("a", "b")
        with pytest.raises(EngineFailure, match=r"no config\.json"):
            await asked(models, "a")
        house.problem = None
        await answered(models, "a")
        assert models.find("a").problem is None

    virtual_time.run(check())


@pytest.mark.parametrize(
    ("keep_s", "gone_after"), [(None, 60.0), (5.0, 5.0), (0.0, 0.0), (math.inf, None)]
)
def test_a_model_goes_when_nobody_asked_for_as_long_as_it_is_kept(
    keep_s: float | None, gone_after: float | None
) -> None:
    async def check() -> None:
        models = House().models("a", "b", idle_s=60.0)
        lease = await asked(models, "a")
        if keep_s is not None:
            assert lease.keep(keep_s)
        await asyncio.sleep(1000)
        assert states(models)[0] == "loaded"  # in use
        lease.release()
        lease.release()
        if gone_after is None:
            await asyncio.sleep(100_000)
            assert states(models)[0] == "loaded"
            return
        assert models.find("a").expires_s == pytest.approx(gone_after)
        await asyncio.sleep(max(0, gone_after - 1))
        assert states(models)[0] == "loaded"
        await asyncio.sleep(2)
        assert states(models)[0] == "unloaded"

    virtual_time.run(check())


def test_who_waits_for_a_model_gets_it_however_soon_it_goes() -> None:
    """The test uses the event loop that servers run on, which turns to timers first."""
    uvloop = pytest.importorskip("uvloop")

    async def check() -> None:
        house = House(load_s=0.01)
        models = house.models("a", "b", idle_s=1e-9)
        async with asyncio.timeout(HANG_S):
            leases = await asyncio.gather(*(asked(models, "a") for _ in range(3)))
        assert house.loads == ["a"]
        for lease in leases:
            lease.release()

    uvloop.run(check())


def test_a_model_is_unloaded_after_all_waiting_requests_left() -> None:
    async def check() -> None:
        house = House()
        models = house.models("a", "b", idle_s=5.0)
        waiting = asyncio.create_task(asked(models, "a"))
        await asyncio.sleep(LOAD_S / 2)
        waiting.cancel()
        await asyncio.sleep(LOAD_S)
        assert states(models)[0] == "loaded"
        await asyncio.sleep(5)
        assert states(models)[0] == "unloaded"

    virtual_time.run(check())


def test_a_model_that_stays_after_all_is_watched_once() -> None:
    async def check() -> None:
        models = House().models("a", "b")
        held = await asked(models, "a")
        unloading = asyncio.create_task(models.unload(models.find("a")))
        await asyncio.sleep(1)
        other = asyncio.create_task(asked(models, "a"))
        await asyncio.sleep(1)
        unloading.cancel()  # its client has left
        await other
        assert held.loaded.broken is not None
        held.loaded.broken.set()
        await asyncio.sleep(1)
        watch = models.find("a").watch
        assert watch is not None
        assert watch.exception() is None
        assert states(models)[0] == "failed"

    virtual_time.run(check())


def test_a_loading_that_hangs_can_be_stopped() -> None:
    async def check() -> None:
        house = House(load_s=1e9)
        models = house.models("a", "b", "c")
        hanging, queued, other = (asyncio.create_task(asked(models, name)) for name in "abc")
        await asyncio.sleep(1000)
        assert states(models) == ["loading"] * 3
        await models.unload(models.find("b"))  # which waits for the one that hangs
        house.load_s = LOAD_S
        await models.unload(models.find("a"))
        for stopped in (hanging, queued):
            with pytest.raises(EngineFailure, match="was stopped"):
                await stopped
        assert (await other).model.users == 1
        assert states(models) == ["unloaded", "unloaded", "loaded"]
        assert list(house.there) == ["c"]
        loading = asyncio.create_task(asked(models, "a"))
        await asyncio.sleep(0)
        await models.unload(models.find("a"))  # before it has started
        with pytest.raises(EngineFailure, match="stopped"):
            await loading
        await answered(models, "a")
        assert states(models) == ["loaded", "unloaded", "loaded"]

    virtual_time.run(check())


def test_a_request_starts_the_time_anew() -> None:
    async def check() -> None:
        models = House().models("a", idle_s=10.0)
        await models.open()
        for _ in range(5):
            await asyncio.sleep(9)
            await answered(models, "a")
        assert states(models) == ["loaded"]
        await asyncio.sleep(11)
        assert states(models) == ["unloaded"]

    virtual_time.run(check())


def test_a_pinned_model_is_kept_whatever_a_request_says() -> None:
    async def check() -> None:
        models = House().models("a", "b", pinned="a", idle_s=1.0)
        lease = await asked(models, "a")
        assert not lease.keep(0.0)
        lease.release()
        await asyncio.sleep(100)
        assert states(models) == ["loaded", "unloaded"]

    virtual_time.run(check())


def test_a_fault_leaves_the_others_alone_and_the_next_request_loads_again() -> None:
    async def check() -> None:
        house = House()
        models = house.models("a", "b")
        held, other = await asked(models, "a"), await asked(models, "b")
        engine = held.loaded.service.client
        engine.failure = "out of memory"  # type: ignore[misc]
        assert held.loaded.broken is not None
        held.loaded.broken.set()
        await asyncio.sleep(1)
        assert states(models) == ["failed", "loaded"]
        assert models.find("a").problem == "out of memory"
        assert not models.broken.is_set()
        held.release()
        await answered(models, "a")
        assert states(models) == ["loaded", "loaded"]
        assert other.loaded is house.there["b"]

    virtual_time.run(check())


def fail(model: Model, why: str = "out of memory") -> None:
    """Let the engine of a loaded model fail."""
    assert model.loaded is not None
    assert model.loaded.broken is not None
    model.loaded.service.client.failure = why  # type: ignore[misc]
    model.loaded.broken.set()


@pytest.mark.parametrize("names", ["a", "ab"])
def test_the_engine_of_a_kept_model_is_started_anew(
    names: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A lone model and a pinned one, with one mechanism."""

    async def check() -> None:
        house = House()
        models = house.models(*names, pinned="a")
        await models.open()
        a = models.find("a")
        for count in (1, 2):
            fail(a)
            waiting = asyncio.create_task(asked(models, "a"))
            await asyncio.sleep(1)
            assert (a.state, a.failure, a.failures) == ("loading", "out of memory", count)
            (await waiting).release()
            assert (a.state, a.failure) == ("loaded", None)
        assert house.loads == ["a"] * 3
        assert not models.broken.is_set()
        await models.close()

    virtual_time.run(check())
    assert "failed: out of memory (failure 2 within 10 min, of which 5 are allowed)" in caplog.text


def test_a_restart_that_fails_is_tried_again_until_one_succeeds() -> None:
    async def check() -> None:
        house = House()
        models = house.models("a")
        await models.open()
        house.problem = "no memory is free"
        fail(models.find("a"))
        await asyncio.sleep(2 * LOAD_S)
        assert models.find("a").failure == "no memory is free"
        house.problem = None
        await asyncio.sleep(2 * LOAD_S)
        assert states(models) == ["loaded"], "no request has come"
        assert models.find("a").failure is None

    virtual_time.run(check())


def test_a_model_that_is_unloaded_is_not_started_anew() -> None:
    async def check() -> None:
        house = House()
        models = house.models("a")
        await models.open()
        for into_s in (LOAD_S / 2, LOAD_S + 0.5):  # in the midst of a loading, and before the next
            house.problem = "no memory is free"
            fail(models.find("a"))
            await asyncio.sleep(into_s)
            await models.unload(models.find("a"))
            await asyncio.sleep(100)
            assert models.find("a").failure is None
            house.problem = None
            await answered(models, "a")

    virtual_time.run(check())


@pytest.mark.parametrize("restarts", [0, 2])
def test_engines_that_fail_too_often_end_the_server(restarts: int) -> None:
    async def check() -> None:
        house = House()
        models = house.models("a", restarts=restarts)
        await models.open()
        for _ in range(restarts):
            fail(models.find("a"))
            await asyncio.sleep(1)
            await answered(models, "a")
            assert not models.broken.is_set()
        fail(models.find("a"))
        await models.broken.wait()
        with pytest.raises(EngineFailure, match=rf"failed {restarts + 1} times within 10 min.*out"):
            await asked(models, "a")
        assert models.find("a").failure == "out of memory"
        await models.close()

    virtual_time.run(check())


def test_restarts_that_fail_end_the_server_too() -> None:
    async def check() -> None:
        house = House()
        models = house.models("a", restarts=3)
        await models.open()
        house.problem = "the folder is gone"
        fail(models.find("a"))
        await models.broken.wait()
        assert len(house.started) == 1 + 3
        await models.close()

    virtual_time.run(check())


def test_a_model_that_fails_too_often_waits_while_others_answer() -> None:
    async def check() -> None:
        models = House().models("a", "b", restarts=1)
        started = now()
        for _ in range(2):
            await answered(models, "a")
            fail(models.find("a"))
            await asyncio.sleep(1)
        with pytest.raises(EngineFailure, match="failed 2 times") as refused:
            await asked(models, "a")
        assert refused.value.retry_after_s is not None
        await answered(models, "b")
        assert not models.broken.is_set()
        await asyncio.sleep(refused.value.retry_after_s)
        await answered(models, "a")
        assert now() - started > WITHIN_S

    virtual_time.run(check())


def test_failures_that_are_far_apart_end_nothing() -> None:
    async def check() -> None:
        models = House().models("a", restarts=1)
        await models.open()
        for _ in range(10):
            fail(models.find("a"))
            await asyncio.sleep(WITHIN_S)
        assert states(models) == ["loaded"]
        assert not models.broken.is_set()

    virtual_time.run(check())


def test_what_breaks_down_while_another_loads_leaves_it_the_room() -> None:
    async def check() -> None:
        house = House(room=1)
        models = house.models("a", "b")
        held = await asked(models, "a")
        other = asyncio.create_task(asked(models, "b"))
        await asyncio.sleep(LOAD_S / 2)
        assert held.loaded.broken is not None
        held.loaded.broken.set()
        (await other).release()
        assert states(models) == ["failed", "loaded"]

    virtual_time.run(check())


def test_memory_is_divided_by_the_loaded_models() -> None:
    async def check() -> None:
        house = House()
        models = house.models("a", "b", memory=10_000)
        await answered(models, "a")
        await answered(models, "b")
        await models.unload(models.find("a"))
        await answered(models, "a")
        shared = [(each.sharers, each.reserved, each.memory) for each in house.configs]
        # A loaded engine was promised 5,096 bytes, of which pages hold 4,096.
        assert shared == [(2, 0, 10_000), (1, 1000, 4904), (1, 1000, 4904)]

    virtual_time.run(check())


@pytest.mark.parametrize("started_s", [0, 1])
def test_closing_ends_loading_and_loaded_models(started_s: int) -> None:
    async def check() -> None:
        house = House()
        models = house.models("a", "b")
        await answered(models, "a")
        loading = asyncio.create_task(asked(models, "b"))
        await asyncio.sleep(started_s)
        await models.close()
        assert not house.there
        with pytest.raises(EngineFailure, match="shutting down"):
            await loading
        with pytest.raises(EngineFailure, match="shutting down"):
            await asked(models, "b")

    virtual_time.run(check())


def test_adapters_of_models_that_are_not_loaded() -> None:
    async def check() -> None:
        house = House()
        models = house.models("a", "b")
        a, b = models
        await change_adapter(models, a, "late", place="folder")
        assert states(models) == ["loaded", "unloaded"], "the engine has not judged the adapter"
        assert a.config.engine.adapters == (("late", "folder"),)
        engine = house.there["a"].service.client
        assert isinstance(engine, ScriptedEngine)
        assert engine.questions == [ChangeAdapter(0, "late", "folder")]
        await models.unload(a)
        await change_adapter(models, a, "late", place=None)  # though its folder may be gone
        assert states(models) == ["unloaded", "unloaded"]
        assert not a.config.engine.adapters
        # Two models at once, one of which is being loaded: one gets the name.
        loading = asyncio.create_task(answered(models, "a"))
        await asyncio.sleep(LOAD_S / 2)
        changes = (change_adapter(models, each, "late", place="folder") for each in (a, b))
        results = await asyncio.gather(*changes, return_exceptions=True)
        await loading
        (refused,) = [each for each in results if each is not None]
        assert "already the name of a model" in str(refused)
        engine = house.there["a"].service.client
        assert isinstance(engine, ScriptedEngine)
        assert engine.questions == [ChangeAdapter(0, "late", "folder")]
        assert not b.config.engine.adapters
        await models.close()

    virtual_time.run(check())

"""The processes of a split model: one leads, and sends the others each step's plan.

The leading process has the engine, which makes each plan once. A follower has an executor with its
part of the model and of the KV cache. It repeats the calls of the leading executor in order, and
samples the same tokens from the same logits, so no token is sent. If a process dies, all end.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from quire.cache.blocks import PoolKey
from quire.cache.host_block import HostBlock
from quire.cache.specs import KVLayout
from quire.constraints.masks import TokenMask
from quire.core.config import DiskConfig, EngineConfig
from quire.core.errors import ModelError
from quire.core.frames import encode
from quire.core.hosts import LOCAL, Hosts
from quire.core.media import MediaKey
from quire.core.speculation import HEAD
from quire.device.cards import count_cards
from quire.device.device import current_device
from quire.device.ranks import Part, chosen_backend, collectives, join
from quire.engine.follower_process import FollowerProcess
from quire.engine.split_disk import OPEN, FollowingDisk, Report, SplitDisk, rank_disk
from quire.executor.computed import Computed
from quire.executor.contents import Contents
from quire.executor.executor import Executor
from quire.executor.factory import open_pools
from quire.executor.graphs.executor import GraphExecutor
from quire.executor.graphs.opening import open_cuda_graphs
from quire.executor.inputs import StepInputs
from quire.models.stages import LayeredModel
from quire.models.weights.loader import LoadedModel
from quire.scheduler.plan import StepPlan

_FIRST_PORT = 32_323
"""Ports of ranks on several machines count up from it, as `mlx.launch` has them."""
_PROBE_S = 10.0
"""Seconds between two measurements of the ranks' own speed."""
_PROBES = 3
"""Number of runs of a probe, whose median counts."""
START, PROBE = "start", "probe"


@dataclass(frozen=True, slots=True)
class Follow:
    """First message to a follower: its part, and the addresses where all ranks meet."""

    config: EngineConfig
    part: Part
    addresses: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the leading executor, which followers repeat.

    Attributes:
        method: its name, or that of a method of the executor's `contents` or `disk`. `START` has a
            new executor made, `OPEN` its disk tier opened before, `PROBE` has the rank's speed
            measured and reported.
    """

    method: str
    arguments: tuple[Any, ...] = ()

    def of(self, executor: Executor) -> Any:
        """Call the method of an executor."""
        return attrgetter(self.method)(executor)(*self.arguments)


class Followers:
    """Owns the other processes of a split model."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the followers and join their group.

        Raises:
            ModelError: the model cannot be split here, or a process does not start.
        """
        check_split(config)
        hosts = _hosts(config)
        addresses = _addresses(hosts)
        self.part = Part(0, config.ranks)
        self._beside = hosts.local_size(0)
        self._disk: SplitDisk | None = None
        self._processes = [
            FollowerProcess(
                hosts,
                rank,
                Follow(config, Part(rank, config.ranks), addresses),
                heard=self._heard,
            )
            for rank in range(1, config.ranks)
        ]
        for process in self._processes:
            process.await_ready()
        join(self.part, addresses, backend=hosts.backend, rdma=[each.rdma for each in hosts.hosts])

    def tell(self, method: str, *arguments: Any) -> None:
        """Make the followers' executors repeat a call."""
        frame = encode(Call(method, arguments))
        for process in self._processes:
            process.send(frame)

    def open_executor(
        self, loaded: LoadedModel, config: EngineConfig, **parts: Any
    ) -> LeadingExecutor:
        """Return a new executor of the leading process, see `executor.factory.open_executor`;
        followers start with new ones.
        """
        self.tell(START, config)
        return LeadingExecutor(self, loaded, config, **parts)

    def open_disk(self, config: DiskConfig, loaded: LoadedModel) -> SplitDisk:
        """Open the disk tier of all processes; those of followers for their next executor."""
        self.tell(OPEN, config, loaded.fingerprint)
        found = rank_disk(config, loaded, loaded.fingerprint, part=self.part, beside=self._beside)
        self._disk = SplitDisk(*found, followers=len(self._processes), tell=self.tell)
        return self._disk

    def release_blocks(self) -> None:
        """Let followers drop blocks read from disk that no request waits for any more."""
        if self._disk is not None:
            self._disk.forget_unused()

    def _heard(self, report: Report) -> None:
        assert self._disk is not None, "only disk tiers report"
        self._disk.heard(report)

    @property
    def work_seconds(self) -> tuple[float, ...]:
        """The last measurement of each follower, see `SplitExecutor.probe`."""
        return tuple(process.work_seconds for process in self._processes)


class SplitExecutor(GraphExecutor):
    """An executor of a part of a model. It launches steps whole, because the other ranks wait for
    its sums. CUDA graphs run on one machine, where ranks reach each other's memory.

    Attributes:
        disk: a follower's disk tier.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        part: Part,
        *,
        disk: FollowingDisk | None = None,
        **others: Any,
    ) -> None:
        self.disk = disk
        if disk is not None:
            others["spill"] = disk.spill
        model, by_rank = loaded.model, loaded.layers_by_rank
        self._stages = [(len(each), open_pools(loaded, config, each)) for each in by_rank]
        pools = self._stages[part.rank][1] if by_rank else open_pools(loaded, config)
        graphs = None
        if _hosts(config).local_size(0) == part.size and not by_rank:
            layout = KVLayout.of(model.layout)
            graphs = open_cuda_graphs(model, layout, pools, identity=loaded.fingerprint, part=part)
        super().__init__(model, pools, graphs, compiles=False, **others)
        self.most_following = 0

    def _holds_back(self) -> bool:
        return False

    def block_bytes(self, pool: PoolKey) -> int:
        """Return what a block claims of this process's budget. Of a model split by layers, another
        process's memory is taken to be in proportion to its layers, and may hold fewer blocks.
        """
        if not self._stages:
            return super().block_bytes(pool)
        own, _ = self._stages[0]
        return max(-(-pools.claimed_bytes(pool) * own // count) for count, pools in self._stages)

    def _run(self, inputs: StepInputs) -> Computed:
        if not self._stages:
            return super()._run(inputs)
        # A rank's pools do not need the exchanges after its own layers, but the next rank's do.
        halves = inputs.halves()
        if halves is None:
            return super()._run(inputs)._replace(awaited=True)
        assert isinstance(self.model, LayeredModel), "it is split by layers"
        return Computed(mx.concatenate(self.model.together(halves)), awaited=True)

    def hold_block(self, name: bytes) -> None:
        """Keep this follower's part of a block that was read, until a plan restores it."""
        assert self.disk is not None, "blocks come from a disk tier"
        self.contents.hold_block(name, self.disk.block(name))

    def probe(self) -> float:
        """Return the seconds of one product with this rank's part of the head: the same work on
        each rank, for which none waits for another.
        """
        model: Any = self.model
        mx.synchronize()
        row = model.model.embed_tokens(mx.array([0]))
        mx.eval(row)
        times = []
        for _ in range(_PROBES):
            started = time.perf_counter()
            mx.eval(model.logits(row) if self._stages else model.lm_head(row))
            mx.synchronize()
            times.append(time.perf_counter() - started)
        return median(times)


class _LeadingContents(Contents):
    """Contents that followers get, too."""

    def __init__(self, followers: Followers) -> None:
        super().__init__()
        self._followers = followers

    def hold_features(self, key: MediaKey, features: bytes) -> None:
        self._followers.tell("contents.hold_features", key, features)
        super().hold_features(key, features)

    def hold_block(self, name: bytes, block: HostBlock) -> None:
        self._followers.tell("hold_block", name)
        super().hold_block(name, block)

    def release_features(self, key: MediaKey) -> None:
        self._followers.tell("contents.release_features", key)
        super().release_features(key)


class LeadingExecutor(SplitExecutor):
    """An executor whose calls followers repeat."""

    def __init__(
        self, followers: Followers, loaded: LoadedModel, config: EngineConfig, **parts: Any
    ) -> None:
        contents = _LeadingContents(followers)
        super().__init__(loaded, config, followers.part, contents=contents, **parts)
        self._followers = followers
        self._probed_at = 0.0
        self._own_seconds = 0.0

    @property
    def work_seconds(self) -> tuple[float, ...]:
        return (self._own_seconds, *self._followers.work_seconds)

    def launch(self, plan: StepPlan | None) -> float:
        if plan is not None and time.monotonic() - self._probed_at > _PROBE_S:
            self._followers.tell(PROBE)
            self._own_seconds = self.probe()
            self._probed_at = time.monotonic()
        self._followers.release_blocks()
        self._followers.tell("launch", plan)
        return super().launch(plan)

    def draw(self, masks: Mapping[int, TokenMask | None]) -> None:
        self._followers.tell("draw", masks)
        super().draw(masks)

    def flush(self) -> None:
        self._followers.tell("flush")
        super().flush()

    def prepare(self) -> None:
        self._followers.tell("prepare")
        super().prepare()

    def clear(self) -> None:
        self._followers.tell("clear")
        super().clear()


def check_split(config: EngineConfig) -> None:
    """Raise `ModelError` if a setting does not go with a split model."""
    hosts = _hosts(config)
    setting = "tensor_parallel" if config.pipeline is None else "pipeline"
    cards, here = count_cards(), hosts.local_size(0)
    if chosen_backend(hosts.backend) == "nccl" and 0 < cards < here:
        raise ModelError(
            f"{here} processes on this machine need a GPU each, and it has {cards}",
            setting=setting,
        )
    if config.adapters:
        raise ModelError("split models do not support adapters of requests", setting=setting)
    if config.speculate == HEAD:
        said = "split models do not support the model's own draft head"
        raise ModelError(said, setting=setting)
    if config.batch_invariant and current_device().kernel_language:
        said = "split models do not support batch invariance on GPUs"
        raise ModelError(said, setting=setting)


def pipeline_of(config: EngineConfig, part: Part) -> tuple[int, ...]:
    """Return the weights by which layers are divided; empty if each layer is split. All ranks call
    it at the same point.
    """
    if config.pipeline is None:
        return ()
    if config.pipeline:
        return config.pipeline
    own = mx.array([current_device().weight_memory() >> 20], mx.int32)
    return tuple(map(int, np.array(collectives().gathered(own))))


def shared(config: EngineConfig) -> EngineConfig:
    """Return the settings of each of several processes. Those of one machine share its memory and
    its cores, unless each has a card.
    """
    hosts = _hosts(config)
    if chosen_backend(hosts.backend) == "nccl":
        return config
    beside = hosts.local_size(0)
    threads = config.threads or max(1, (os.cpu_count() or 1) // beside)
    return replace(config, threads=threads, sharers=max(config.sharers, beside))


def _hosts(config: EngineConfig) -> Hosts:
    return config.hosts or Hosts.local(config.ranks)


def _addresses(hosts: Hosts) -> tuple[tuple[str, ...], ...]:
    if all(each.ssh in LOCAL for each in hosts.hosts):
        ports = _free_ports(sum(len(each.ips) for each in hosts.hosts))
    else:
        ports = list(range(_FIRST_PORT, _FIRST_PORT + sum(len(each.ips) for each in hosts.hosts)))
    return tuple(tuple(f"{ip}:{ports.pop(0)}" for ip in each.ips) for each in hosts.hosts)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports

"""The interface between the engine, which plans steps, and the executor, which computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quire.cache.blocks import PoolKey
from quire.cache.host_block import HostBlock
from quire.constraints.masks import TokenMask
from quire.core.kv_format import KVFormat
from quire.executor.adapters import Adapters
from quire.executor.contents import Contents
from quire.scheduler.plan import GraphRows, StepPlan, StepResult


class Executor(Protocol):
    """Runs the steps of one model, one at a time. Owns the running step, the pools, and what
    encoders made.

    Plans and results are frozen values that can be pickled, so an executor may be in another
    process. The next step is built while one runs. If a call raises, the running step is lost:
    `clear` then makes the executor ready for new plans.
    """

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters in memory, which plans name."""
        ...

    @property
    def contents(self) -> Contents:
        """Bytes that plans name by key. The engine adds them before it launches the plans."""
        ...

    @property
    def planned_bytes(self) -> int:
        """Bytes that it may allocate later, beside the pools."""
        ...

    @property
    def work_seconds(self) -> tuple[float, ...]:
        """How long each rank of a split model took for the same work, see `EngineStats`; empty for
        a whole model.
        """
        ...

    @property
    def most_following(self) -> int:
        """The most rows of a step that follows drafts of a running one, and may be built while that
        runs. Steps of more rows are built once the drafts are read. 0 if it runs no such steps.
        """
        ...

    def block_bytes(self, pool: PoolKey) -> int:
        """Return the bytes of the KV budget that one block of a pool claims."""
        ...

    def grows_in_place(self, pool: PoolKey, budget: int) -> bool:
        """Return whether a pool grows without being copied.

        Args:
            budget: bytes that it may claim at most.
        """
        ...

    def fits(self, pool: PoolKey, block: HostBlock) -> bool:
        """Return whether contents have the types and shapes of a pool's blocks."""
        ...

    def serves(self, format: KVFormat) -> bool:
        """Return whether steps over a KV format may run as CUDA graphs."""
        ...

    def graph_rows(self, format: KVFormat, media: bool) -> GraphRows:
        """Return which steps are likely to be graphed.

        Args:
            media: whether rows of the step are media.
        """
        ...

    def prepare(self) -> None:
        """Compile and load kernels that the steps so far did not need. Nothing may be running."""
        ...

    def launch(self, plan: StepPlan | None) -> float:
        """Build the plan's step while another runs, wait for that one, and start the new one.

        Args:
            plan: None to wait only.

        Returns:
            When the plan's step started to run, by `time.perf_counter`.
        """
        ...

    def draw(self, masks: Mapping[int, TokenMask | None]) -> None:
        """Sample the tokens of the running step, whose plan left some masks open.

        Args:
            masks: masks by sequence number. Rows that awaited a mask and have none are sampled
                without.
        """
        ...

    def flush(self) -> None:
        """Launch the rest of the running step, if `launch` held it back."""
        ...

    def collect(self) -> StepResult:
        """Return the results of the step that the last `launch` waited for, once."""
        ...

    def clear(self) -> None:
        """Drop the results of a failed step, and everything cached."""
        ...

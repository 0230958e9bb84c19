"""The sources of the kernels of a mixture's router."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.device.gpu_kernels import kernel_text
from quire.device.mixture import Router, Routing
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.recorder import EXPERT_TILE
from quire.executor.graphs.source import C_TYPES, literal, own_text, written_source
from quire.models.layers.routers import SparseMixer

ROUTE_THREADS = 1024
SCORING_THREADS = 128
_MOST_EXPERTS, _MOST_CHOSEN = 1024, 32


@dataclass(frozen=True, slots=True)
class Route:
    """Parameters of `route.cuh`.

    Attributes:
        types: C types of logits, corrections and factors; None for an absent one.
    """

    router: Router
    experts: int
    types: tuple[str, str | None, str | None]

    @staticmethod
    def of(
        router: Router,
        experts: int,
        correction: mx.array | None,
        per_expert: mx.array | None,
        logits: mx.Dtype,
    ) -> Route:
        """Return the kernel for a router.

        Raises:
            UnsupportedNode: its kind is unknown, or it has too many experts.
        """
        if router.routing is None and not isinstance(router, SparseMixer):
            raise UnsupportedNode(f"a router of type {type(router).__name__}")
        if experts > _MOST_EXPERTS or router.k > _MOST_CHOSEN:
            raise UnsupportedNode(f"{router.k} of {experts} experts")
        more = (None if each is None else C_TYPES[each.dtype] for each in (correction, per_expert))
        return Route(router, experts, (C_TYPES[logits], *more))  # type: ignore[arg-type]  # of three

    @property
    def k(self) -> int:
        return self.router.k

    def text(self, max_tiles: int, tile: int = EXPERT_TILE) -> str:
        """Return the source of a kernel that routes and groups, in one thread block.

        Parameters: rows, logits, corrections, factors of experts, chosen, weights, order, tiles.

        Args:
            max_tiles: the most tiles.
            tile: pairs of row and expert in a tile.
        """
        parameters = [*self._parameters(), "int* order", "int* tiles"]
        defines = {**self._defines(), **_tiling(tile, max_tiles)}
        body = own_text("route.cuh") + "__syncthreads();\n" + _grouping_text()
        return written_source(parameters, body, ROUTE_THREADS, defines=defines)

    def alone(self) -> str:
        """Return the source of a kernel that routes one row, and groups its pairs, in one warp.

        Parameters: as of `text`.
        """
        parameters = [*self._parameters(), "int* order", "int* tiles"]
        defines = {**self._defines(), "ALONE": 1}
        return written_source(parameters, own_text("route.cuh"), 32, defines=defines)

    def scoring(self) -> str:
        """Return the source of a kernel that routes, in thread blocks of `SCORING_THREADS`.

        Parameters: rows, logits, corrections, factors of experts, chosen, weights.
        """
        body = own_text("route.cuh")
        return written_source(self._parameters(), body, SCORING_THREADS, defines=self._defines())

    def _parameters(self) -> list[str]:
        logits, correction, per_expert = self.types
        parameters = ["const int* rows", f"const {logits}* logits"]
        parameters += [f"const {correction or 'float'}* correction"]
        return [
            *parameters,
            f"const {per_expert or 'float'}* per_expert",
            "int* chosen",
            "float* weights",
        ]

    def _defines(self) -> dict[str, object]:
        _, correction, per_expert = self.types
        return {
            "EXPERT_COUNT": self.experts,
            "TOP": self.k,
            "ALONE": 0,
            "CORRECTED": int(correction is not None),
            "PER_EXPERT": int(per_expert is not None),
            **self._rule(),
        }

    def _rule(self) -> dict[str, object]:
        rule = self.router.routing or Routing(self.k, sigmoid=False, normalise=False)
        grouped, corrected = rule.best_groups < rule.groups, self.types[1] is not None
        own: dict[str, object] = {"SCORES": int(rule.sigmoid)}
        if isinstance(self.router, SparseMixer):
            own = {"SCORES": 2, "JITTER": literal(self.router.jitter, mx.float32)}
        return {
            **own,
            "PROBABLE": int(corrected or (grouped and (rule.sigmoid or rule.counted > 1))),
            "NORMALISE": int(rule.normalise),
            "SCALE": literal(rule.scale, mx.float32),
            "GROUPS": rule.groups,
            "OPEN": rule.best_groups,
            "COUNTED": rule.counted,
            "CAPPED": int(bool(rule.softcap)),
            "CAP": literal(rule.softcap, mx.float32),
        }


def grouping(experts: int, k: int, max_tiles: int, tile: int) -> str:
    """Return the source of a kernel that groups pairs of row and expert, in one thread block.

    Parameters: rows, chosen, order, tiles.

    Args:
        k: experts of a row. For the others see `Route.text`.
    """
    parameters = ["const int* rows", "const int* chosen", "int* order", "int* tiles"]
    defines = {"EXPERT_COUNT": experts, "TOP": k, **_tiling(tile, max_tiles)}
    return written_source(parameters, _grouping_text(), ROUTE_THREADS, defines=defines)


def _tiling(tile: int, most: int) -> dict[str, object]:
    return {"TILE": tile, "MOST": most, "TILE_COUNTS": 1}


def _grouping_text() -> str:
    return "const int chosen_shape[1] = {*rows * TOP};\n" + kernel_text(
        "quire.device.cuda", "group.cuh"
    )

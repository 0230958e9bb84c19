"""Engines with recorded steps held against the model's own way, on a GPU or in an emulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from quire.attention.backend import Backends
from quire.attention.reference import ReferenceBackend
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.device.device import current_device
from quire.executor import eager, factory
from quire.executor.graphs.runner import CUDAGraphs
from quire.models.base import named_parameters
from quire.models.weights.loader import LoadedModel
from quire.models.weights.low_rank import LowRank
from tests.executor.graphs.test_recording import FAMILIES
from tests.support.choices import Choices
from tests.support.packed_models import in_codes, packed_model
from tests.support.parity import SCENARIOS, Company, Generated, alone, prompts
from tests.support.precise import PreciseOperations

TOKENS = 12
NEAR = 0.2
"""The most that a logit of the token drawn may be below the reference's best, in deviations of the
row's logits: twice their error, since both may be off by as much."""
FAR = 0.1
"""The largest relative error of a row's logits."""
CODED = 2.5
"""Factor of the tolerance over codes, because numbers at an edge may be rounded to other codes."""

PLAIN_BLOCKS = KVFormat()
LONG = {"head_dim": 256, "global_head_dim": 512}
CODED_FAMILIES = FAMILIES | {
    "llama, heads of 128": FAMILIES["llama"] | {"head_dim": 128},
    "gemma4_moe, heads of 256 and 512": FAMILIES["gemma4_moe"] | LONG,
}
GROWN_FAMILIES = ["mimo_v2_flash", "glm4_moe_lite", "deepseek_v32", "kimi_linear"]
"""Values shorter than keys, latents, latents that an indexer chooses, and latents beside states."""
CODED_FORMATS: list[tuple[KVFormat, tuple[int, ...]]] = [
    (KVFormat("uniform", 4, 4), ()),
    (KVFormat("uniform", 8, 8), ()),
    (KVFormat("turbo", 4, 4), ()),
    (KVFormat("turbo", 3, 3), ()),
    (KVFormat("turbo", 3.5, 3.5), (1,)),
    (KVFormat("uniform", 4, 4), (0,)),
    (KVFormat("page", 4, 4), ()),
    (KVFormat("page", 8, 8), ()),
    (KVFormat("page", 8, 4), (1,)),
    (KVFormat("page", 6, 3), ()),
]
"""Coded formats, each with the layers that it skips."""


def opened(
    config: dict[str, Any], pack: Callable[[nn.Module], None] = in_codes, heads: int = 0
) -> LoadedModel:
    """Return `packed_model` as if it was loaded; for the arguments see there."""
    mx.random.seed(0)
    model = packed_model(config, pack, heads)
    size = sum(each.nbytes for each in named_parameters(model).values())
    return LoadedModel(
        model,
        config,
        Path(),
        frozenset(),
        "random",
        size,
        1024,
        1024,
        "bfloat16",
        read_adapter=lambda place: LowRank({}, place),
    )


def assert_the_same_bits_in_any_batch(
    loaded: LoadedModel,
    wanted: list[Request],
    format: KVFormat = PLAIN_BLOCKS,
    skipped: tuple[int, ...] = (),
    scenarios: Iterable[str] = SCENARIOS,
) -> None:
    """Assert that `batch_invariant` gives requests their own logits and tokens in any batch."""
    config = EngineConfig(
        "",
        kv_memory=256 << 20,
        kv_format=format,
        kv_skip_layers=skipped,
        prefix_cache=False,
        batch_invariant=True,
    )
    expected = alone(loaded, config, wanted)
    for name in scenarios:
        got = SCENARIOS[name](loaded, config, wanted)
        for request in wanted:
            ours, theirs = got[request.id], expected[request.id]
            assert ours.tokens == theirs.tokens, f"{name}: {request.id}"
            for position, logits in theirs.logits.items():
                same = mx.array_equal(ours.logits[position], logits).item()
                assert same, f"{name}: {request.id} at {position}"


@dataclass(frozen=True, slots=True)
class Compared:
    """Engines whose recorded steps are held against the model.

    Attributes:
        wholes: the recorded steps of engines opened since.
        prompts: the prompt rows of each recorded step that has any.
        choices: the experts and keys that engines chose.
    """

    wholes: list[CUDAGraphs]
    prompts: list[int]
    choices: Choices
    monkeypatch: pytest.MonkeyPatch

    def assert_agree(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        rounds: list[list[Request]],
        names: list[str],
        further: float = 1,
        counts: Iterable[int] = (),
    ) -> None:
        """Each number of rows against the model's own way; tokens and logits against the reference.

        Args:
            rounds: requests at a time, as many as steps are recorded for.
            names: of requests that are held against the reference.
            further: how many times as far as plain blocks logits may be.
            counts: rows that steps must be recorded for; those of the rounds unless said otherwise.
        """
        company = Company(loaded, config)
        for requests in rounds:
            company.run(requests)
        (whole,) = self.wholes
        stored = replace(config.kv_format, skip_layers=config.kv_skip_layers or ())
        wanted = list(counts) or [len(requests) for requests in rounds]
        assert whole.verified.keys() >= {(stored, count) for count in wanted}
        assert all(whole.verified.values())
        assert any(self.prompts)
        every = [each for requests in rounds for each in requests if each.id in names]
        self._assert_near(loaded, config, every, company.answers, further)

    def _assert_near(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        asked: list[Request],
        answers: dict[str, Generated],
        further: float,
    ) -> None:
        """Tokens and logits against the model in float32, `further` times as far as plain ones. A
        quarter of the tokens may be further where it is unknown which experts a step chose.

        Mutates: the model.
        """
        patch = self.monkeypatch.setattr
        patch(factory, "open_cuda_graphs", lambda *arguments, **options: None)
        patch(eager, "open_backends", lambda: Backends([ReferenceBackend()]))
        patch(current_device(), "operations", PreciseOperations())
        _widen(loaded.model)
        far, compared = list[str](), 0
        for request in asked:
            tokens, prompt, answer = answers[request.id].tokens, request.prompt, answers[request.id]
            forced = [
                replace(request, id=f"{n}", prompt=(*prompt, *tokens[:n]), max_tokens=1)
                for n in range(len(tokens))
            ]
            self.choices.follow(request.id, further)
            expected = served(loaded, forced, config)
            assert not self.choices.impossible, f"{request.id}: {self.choices.impossible[0]}"
            for n, token in enumerate(tokens):
                (theirs,) = expected[f"{n}"].logits.values()
                ours = answer.logits[len(prompt) + n]
                spread = mx.std(theirs).item()
                below = (theirs.max() - theirs[token]).item() / spread
                error = (mx.linalg.norm(ours - theirs) / mx.linalg.norm(theirs)).item()
                compared += 1
                if not (below <= further * NEAR and error < further * FAR):  # NaN is not near
                    message = f"logits differ by {error:.2g}, token below by {below:.3f} deviations"
                    far.append(f"{request.id}, token {n}: {message}")
        assert not self.choices.unknown or mx.cuda.is_available(), "an emulated step chose unheard"
        assert len(far) <= (compared // 4 if self.choices.unknown else 0), far[0]


def _widen(model: nn.Module) -> None:
    """Mutates: convert floats in bfloat16 to float32."""
    floats = {k: v for k, v in named_parameters(model).items() if v.dtype == mx.bfloat16}
    model.load_weights([(k, v.astype(mx.float32)) for k, v in floats.items()], strict=False)


def streams_of(counts: list[int], named: str = "") -> list[list[Request]]:
    """Return groups of so many requests; their ids are `NAMED COUNT-rN`, and each name has other
    prompts.
    """
    return [
        [
            replace(each, id=f"{named}{count}-{each.id}", max_tokens=TOKENS)
            for each in prompts([3 + 7 * n % 150 for n in range(count)], seed=count + len(named))
        ]
        for count in counts
    ]


def served(
    loaded: LoadedModel, requests: list[Request], config: EngineConfig
) -> dict[str, Generated]:
    return Company(loaded, config).run(requests)

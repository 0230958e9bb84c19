"""One served model, from a client's request to a stream of events.

`Service.prepare` makes prompts of a `Generation`, or refuses it. `Service.start` queues them and
returns a `GenerationStream` that yields the events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.info import ModelInfo
from quire.core.request import SamplingParams
from quire.serving.constraints import Constraints
from quire.serving.generation import Generation, Prepared
from quire.serving.interface import EngineClient
from quire.serving.prompts import Prompts
from quire.serving.streams import GenerationStream, Observer
from quire.serving.submission import Constrained, Submission
from quire.serving.tasks import close_all
from quire.serving.vectors import Vectors
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Service:
    """One served model: tokenizer, template and dialect, with the engine behind `client`.

    Attributes:
        name: what clients call the model.
        sampling: default sampling parameters.
    """

    name: str
    client: EngineClient
    prompts: Prompts
    constraints: Constraints
    submission: Submission
    vectors: Vectors
    sampling: SamplingParams

    @property
    def info(self) -> ModelInfo:
        return self.client.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prompts.tokenizer

    @property
    def template(self) -> ChatTemplate:
        return self.prompts.template

    @property
    def modalities(self) -> tuple[str, ...]:
        """The kinds of content that messages may contain."""
        return ("text", *self.prompts.media.kinds)

    async def prepare(self, spec: Generation, *, light: bool = False) -> Prepared:
        return await self.prompts.prepare(spec, light=light)

    async def constrain(self, prepared: Prepared) -> Constrained:
        return await self.submission.constrain(prepared)

    async def submit(self, constrained: Constrained) -> GenerationStream:
        return await self.submission.submit(constrained)

    async def start(self, prepared: Prepared) -> GenerationStream:
        """Compile the grammar, and queue the requests."""
        return await self.submit(await self.constrain(prepared))

    def observe(self, observer: Callable[[str, int], Observer]) -> None:
        self.submission.observe(observer)

    async def close(self) -> None:
        """End the engine and all other processes of this service. May be called again."""
        await close_all(self.constraints.close(), self.client.close())

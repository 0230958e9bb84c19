"""How a model's hidden states become one vector, by the files of its folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.core.errors import NotOffered, RequestError
from quire.core.folder import read_object
from quire.core.request import Embed
from quire.core.sentence_modules import SETTINGS, SentenceModules, read_modules

ACTIVATIONS: Mapping[str, Callable[[float], float]] = {
    "Identity": lambda logit: logit,
    "Sigmoid": lambda logit: 1 / (1 + math.exp(min(700.0, -logit))),
    "Tanh": math.tanh,
}
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of prompts of documents, of which the first that a model has is used."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How one model embeds.

    Attributes:
        task: default task of requests.
        trained: whether the model's files name a pooling. If not, the model was trained to
            generate, not to embed.
        stages: what the files say of texts and their prompts.
        activation: name of the function that makes a classification head's logit a score, of
            `ACTIVATIONS` or unknown.
    """

    task: Embed = field(default_factory=lambda: Embed("mean"))
    trained: bool = False
    stages: SentenceModules = field(default_factory=SentenceModules)
    activation: str = "Sigmoid"

    @property
    def problem(self) -> str:
        """Why the model's own pooling cannot be computed; empty if it can."""
        what = self.stages.problem
        return what and f"This model cannot create embeddings: {what}."

    @property
    def query_prompt(self) -> str:
        """The prompt of queries; empty if the model has none."""
        return self.stages.prompts.get("query", "")

    @property
    def document_prompt(self) -> str:
        """The prompt of documents; empty if the model has none."""
        prompts = self.stages.prompts
        return next((prompts[name] for name in _DOCUMENT_PROMPTS if name in prompts), "")

    def prompt(self, name: str | None) -> str:
        """Return the model's prompt of a name; None names the model's default.

        Raises:
            RequestError: the model has none of this name.
            NotOffered: the model leaves the prompt's tokens out of the pooling.
        """
        prompts = self.stages.prompts
        if name is None:
            text = prompts.get(self.stages.default_prompt, "")
        elif name in prompts:
            text = prompts[name]
        else:
            known = ", ".join(f"'{each}'" for each in prompts) or "none"
            raise RequestError(
                f"'prompt_name' is '{name}'; this model has: {known}.",
                param="prompt_name",
                code="invalid_value",
            )
        if text and not self.stages.pools_prompt:
            raise NotOffered(
                "This model pools a text without its prompt ('include_prompt' is false), which is "
                "not supported; send the text without 'prompt_name'.",
                param="prompt_name",
                code="not_implemented",
            )
        return text

    def text(self, text: str, prompt: str) -> str:
        """Return a text as it is encoded, behind a prompt."""
        whole = prompt + text
        return whole.lower() if self.stages.lowercase else whole

    def check(self) -> None:
        """Raise `NotOffered` if the model's own pooling cannot be computed."""
        if self.problem:
            raise NotOffered(self.problem, param="model", code="not_implemented")


def read_pooling(folder: Path) -> Pooling:
    """Read a model's pooling from the files of its folder."""
    stages, activation = read_modules(folder), _activation(folder)
    if stages is None:
        return Pooling(activation=activation)
    task = Embed(stages.pooling, stages.normalized)
    return Pooling(task, trained=True, stages=stages, activation=activation)


def _activation(folder: Path) -> str:
    """Return the activation that sentence-transformers' `CrossEncoder` has written: in a file of
    its own, or earlier in the model's.
    """
    config = read_object(folder / "config.json")
    older = config.get("sentence_transformers")
    places = [read_object(folder / SETTINGS), older if isinstance(older, dict) else {}]
    written = [each["activation_fn"] for each in places if each.get("activation_fn")]
    named = next(iter(written), config.get("sbert_ce_default_activation_function"))
    return str(named).rpartition(".")[2] if named else "Sigmoid"

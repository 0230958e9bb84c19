"""Dialects turn a model's tokens into reasoning, text and tool calls. This module is their
registry.
"""

from __future__ import annotations

from quire.core.errors import ModelError
from quire.text.dialects.apertus import APERTUS
from quire.text.dialects.base import Call, Dialect, Parser, Tool, Vocabulary
from quire.text.dialects.cohere import COHERE
from quire.text.dialects.deepseek import DEEPSEEK, DSML
from quire.text.dialects.ernie import ERNIE
from quire.text.dialects.gemma4 import GEMMA4
from quire.text.dialects.glm4 import GLM4, LONGCAT
from quire.text.dialects.glm4_9b import GLM4_9B
from quire.text.dialects.granite import GRANITE
from quire.text.dialects.harmony import HARMONY
from quire.text.dialects.hunyuan import HUNYUAN
from quire.text.dialects.hy3 import HY3
from quire.text.dialects.jamba import JAMBA
from quire.text.dialects.kimi_k2 import KIMI_K2
from quire.text.dialects.kimi_k3 import KIMI_K3
from quire.text.dialects.lfm2 import LFM2
from quire.text.dialects.llama3 import LLAMA3
from quire.text.dialects.minimax import MINIMAX
from quire.text.dialects.mistral import MISTRAL
from quire.text.dialects.muse import MUSE
from quire.text.dialects.nemotron import NEMOTRON, NEMOTRON_MINI
from quire.text.dialects.none import NONE
from quire.text.dialects.olmo3 import OLMO3
from quire.text.dialects.phi4 import PHI4
from quire.text.dialects.qwen import QWEN3, QWEN3_CODER
from quire.text.dialects.seed import SEED

__all__ = [
    "DIALECTS",
    "NONE",
    "Call",
    "Dialect",
    "Parser",
    "Tool",
    "Vocabulary",
    "choose_dialect",
    "named",
]

# In the order in which they are tried on a template: the more specific first.
DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        GEMMA4,
        HARMONY,
        KIMI_K3,
        KIMI_K2,
        MINIMAX,
        MUSE,
        DSML,
        DEEPSEEK,
        APERTUS,
        HY3,
        GLM4,
        LONGCAT,
        MISTRAL,
        GRANITE,
        SEED,
        LFM2,
        COHERE,
        JAMBA,
        HUNYUAN,
        NEMOTRON,
        NEMOTRON_MINI,
        OLMO3,
        PHI4,
        ERNIE,
        GLM4_9B,
        QWEN3_CODER,
        QWEN3,
        LLAMA3,
        NONE,
    )
}


def named(name: str) -> Dialect:
    """Return the dialect with this name.

    Raises:
        ModelError: there is no such dialect.
    """
    if name not in DIALECTS:
        raise ModelError(f"no dialect {name!r}; there are {', '.join(DIALECTS)}")
    return DIALECTS[name]


def choose_dialect(template: str, model_type: str, override: str | None = None) -> Dialect:
    """Return the dialect of a model.

    Args:
        template: source of the chat template; empty if there is none.
        model_type: the `model_type` of `config.json`.
        override: the name given by `--dialect`.

    Raises:
        ModelError: no dialect has the name `override`.
    """
    if override is not None:
        return named(override)
    return next(d for d in DIALECTS.values() if d.recognises(template, model_type))

"""Opens a draft model, and divides the KV budget between it and the model that it drafts for."""

from __future__ import annotations

import logging
from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.figures import size
from quire.core.kv_format import KVFormat
from quire.device.dtypes import DTYPES
from quire.engine.draft_model import ModelDrafter
from quire.engine.memory import RoomCheck, kv_budget, refuse, sequence_bytes
from quire.executor.segments.runner import open_segments
from quire.models.tokenizers.vocabulary import vocabulary_difference
from quire.models.weights.loader import LoadedModel, open_model

log = logging.getLogger("quire.engine")


def open_draft_model(
    config: EngineConfig, name: str, loaded: LoadedModel
) -> tuple[EngineConfig, ModelDrafter]:
    """Open the draft model of an engine.

    Args:
        config: the engine's settings.
        name: folder or hub id of the draft model.
        loaded: the model that it drafts for.

    Returns:
        The settings with the memory that is left, and the drafter. Both hold sequences of the same
        number of tokens.

    Raises:
        ModelError: it cannot be opened, has another vocabulary, or does not fit into memory.
    """
    left = None if config.memory is None else config.memory - loaded.parameter_bytes
    room = RoomCheck(replace(config, model=name, memory=left), refuse)
    draft = open_model(
        name, dtype=config.dtype, max_context=config.max_context, check_room=room.check
    )
    check_vocabulary(draft, loaded)
    if config.memory is not None:
        config = replace(config, memory=config.memory - draft.parameter_bytes)
    budget = kv_budget(config, loaded.parameter_bytes)
    tokens = config.max_context or loaded.context_length
    own, theirs = (
        sequence_bytes(each.model, DTYPES[each.dtype], config.block_size, format, tokens)
        for each, format in ((draft, KVFormat()), (loaded, config.kv_format))
    )
    share = budget * own // (own + theirs)
    log.info(
        "draft model %s: %s of weights, KV budget %s",
        *(name, size(draft.parameter_bytes), size(share)),
    )
    segments = open_segments(draft.model)
    drafter = ModelDrafter(draft, share, config.block_size, config.step_ms / 1e3, segments)
    return replace(config, kv_memory=budget - share), drafter


def check_vocabulary(draft: LoadedModel, loaded: LoadedModel) -> None:
    """Raise `ModelError` unless both models mean the same text by each token id."""
    difference = vocabulary_difference(draft.path, loaded.path)
    if difference is not None:
        raise ModelError(
            f"speculate: the draft model {draft.path} has another vocabulary than {loaded.path}: "
            f"token {difference.id} is {difference.first!r} in one and {difference.second!r} in "
            "the other; choose a draft model of the same family"
        )

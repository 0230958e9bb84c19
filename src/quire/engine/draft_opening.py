"""Opens the drafters of a model: its own head, or another model that drafts for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.figures import size
from quire.core.kv_format import KVFormat
from quire.core.original_configs import read_config
from quire.core.speculation import DRAFT, HEAD
from quire.device.dtypes import DTYPES
from quire.engine.draft_blocks import BlockDrafter, BlockExecutor
from quire.engine.draft_model import ModelDrafter
from quire.engine.draft_states import HeadExecutor, StatesDrafter, StatesParts
from quire.engine.memory import RoomCheck, kv_budget, refuse, sequence_bytes
from quire.executor.factory import open_executor, open_pools
from quire.executor.graphs.compiling import Compiling
from quire.executor.guessing import (
    AssistantGuesser,
    DraftHeadGuesser,
    Guesser,
    MTPChainGuesser,
    MTPGuesser,
)
from quire.executor.hidden_rows import HiddenRows
from quire.executor.segments.rows import open_row_segments
from quire.executor.segments.runner import open_segments
from quire.models.base import LanguageModel, named_parameters
from quire.models.dflash import build_dflash, is_dflash
from quire.models.draft_head import GuessStep, TokenGuesser, open_draft_head
from quire.models.eagle import build_eagle, is_eagle
from quire.models.families.gemma4 import Gemma4
from quire.models.families.gemma4_assistant import TYPES, build_assistant, named
from quire.models.tokenizers.vocabulary import vocabulary_difference
from quire.models.weights.files import find_weights
from quire.models.weights.hub import find_folder
from quire.models.weights.loader import LoadedModel, checked_config, load_drafter, open_model
from quire.scheduler.drafts import Drafter
from quire.speculation.drafters import lookup_drafters
from quire.speculation.heads import MOST, HeadDrafter

log = logging.getLogger("quire.engine")


@dataclass(frozen=True)
class Drafters:
    """The drafters of an engine.

    Attributes:
        config: the engine's settings, with the memory that drafters leave.
        guesser: the head that a `HeadDrafter` among them stands for, or what keeps the hidden
            states that one of them reads; None if they need nothing of the model's steps.
    """

    config: EngineConfig
    drafters: tuple[Drafter, ...]
    guesser: Guesser | None = None


def open_drafters(loaded: LoadedModel, config: EngineConfig) -> Drafters:
    """Open the drafters that a model and its settings have.

    Raises:
        ModelError: a draft model cannot be opened or does not fit, or a head is missing.
    """
    named = Drafters(config, ())
    if config.draft_model is not None:
        named = _open_named(loaded, config, config.draft_model)
    drafters, guesser = named.drafters, named.guesser
    if guesser is None:
        # The ranks of a split model have no head.
        guesser, most = _open_head(loaded) if config.ranks == 1 else (None, 0)
        if guesser is not None:
            drafters = (HeadDrafter(most), *drafters)
        elif config.speculate == HEAD:
            raise ModelError(
                "the model has no head for 'mtp'; choose auto, ngram or off", setting="speculate"
            )
    return Drafters(named.config, (*lookup_drafters(), *drafters), guesser)


def _open_named(loaded: LoadedModel, config: EngineConfig, name: str) -> Drafters:
    """Open the model that `--speculate draft=MODEL` names."""
    folder = find_folder(name)
    described = read_config(folder)
    reads_states = described.get("model_type") in TYPES or is_eagle(described)
    if config.ranks > 1 and (reads_states or is_dflash(described)):
        raise ModelError(
            f"{name} drafts by the model's hidden states, which split models do not "
            "support; name an ordinary model of the same vocabulary",
            setting="speculate",
        )
    if is_eagle(described):
        return _open_eagle(config, folder, described, loaded=loaded)
    if is_dflash(described):
        return _open_dflash(config, folder, described, loaded=loaded)
    described = checked_config(folder)
    if described["model_type"] in TYPES:
        guesser, nbytes = _open_assistant(folder, described, loaded)
        return Drafters(_without(config, nbytes), (HeadDrafter(name=DRAFT),), guesser)
    config, drafter = open_draft_model(config, str(folder), loaded)
    return Drafters(config, (drafter,))


def _open_head(loaded: LoadedModel) -> tuple[Guesser | None, int]:
    """Return the guesser of the model's own head, and how many tokens it guesses at most."""
    if loaded.model.layout != loaded.model.own_layout:
        layout, count = loaded.model.layout, len(loaded.model.own_layout)
        if len(layout) - count > 1:
            return MTPChainGuesser(loaded.model), len(layout) - count
        # An indexer keeps keys of its own, which rows ahead do not have.
        return MTPGuesser(loaded.model), 1 if KVLayout.of(layout).has_indexers else MOST
    head = open_draft_head(loaded.path, loaded.model)
    if head is None:
        return None, MOST
    norm = head.norm.weight
    fields = {"state": (norm.shape, norm.dtype), "tokens": ((), mx.int32)}
    faster = partial(open_row_segments, fields=fields)
    guesser = TokenGuesser(GuessStep(loaded.model, head), faster)
    for count in range(1, MOST + 1):
        guesser.computing(count)  # traced now, not while serving
    return DraftHeadGuesser(guesser), MOST


def _open_assistant(
    folder: Path, config: dict[str, Any], loaded: LoadedModel
) -> tuple[AssistantGuesser, int]:
    """Open an assistant; return it with the bytes of its weights."""
    if not isinstance(loaded.model, Gemma4):
        raise ModelError(
            f"{folder} is an assistant for Gemma 4; {loaded.path} is another model",
            setting="speculate",
        )
    assistant = build_assistant(config, loaded.model, folder)
    load_drafter(assistant, folder, config, dtype=DTYPES[loaded.dtype], named=named)
    nbytes = sum(array.nbytes for array in named_parameters(assistant).values())
    log.info("assistant %s: %s of weights", folder, size(nbytes))
    return AssistantGuesser(loaded.model, assistant), nbytes


def _open_eagle(
    config: EngineConfig, folder: Path, described: dict[str, Any], loaded: LoadedModel
) -> Drafters:
    """Open an EAGLE-3 head, and what keeps the states that it reads."""
    tensors = find_weights(folder).read(described, dtype=None)
    own_table = any(name.endswith("embed_tokens.weight") for name in tensors)
    head = build_eagle(described, loaded.model, folder, own_table=own_table)
    config, pools, parts = _open_states(config, folder, described, drafter=head, loaded=loaded)
    executor = HeadExecutor(head, pools, parts.states, offsets=parts.offsets)
    return Drafters(config, (StatesDrafter(executor, parts),), parts.states)


def _open_dflash(
    config: EngineConfig, folder: Path, described: dict[str, Any], loaded: LoadedModel
) -> Drafters:
    """Open a DFlash drafter, and what keeps the states that it reads."""
    drafter = build_dflash(described, loaded.model, folder)
    config, pools, parts = _open_states(config, folder, described, drafter=drafter, loaded=loaded)
    executor = BlockExecutor(drafter, pools, parts.states, offsets=parts.offsets)
    return Drafters(config, (BlockDrafter(executor, parts),), parts.states)


def _open_states(
    config: EngineConfig,
    folder: Path,
    described: dict[str, Any],
    drafter: LanguageModel,
    loaded: LoadedModel,
) -> tuple[EngineConfig, Pools, StatesParts]:
    """Load a drafter that reads the model's states, and divide the memory.

    Returns:
        The settings with the memory left, the drafter's pools, and what else it is made of.
    """
    load_drafter(drafter, folder, described, dtype=DTYPES[loaded.dtype], named=drafter.sanitize)
    nbytes = sum(array.nbytes for array in named_parameters(drafter).values())
    config, share = _shared_budget(_without(config, nbytes), drafter, loaded.dtype, loaded=loaded)
    log.info("drafter %s: %s of weights, KV budget %s", folder, size(nbytes), size(share))
    opened = replace(loaded, model=drafter, path=folder)
    parts = StatesParts(
        opened,
        budget=share,
        block_size=config.block_size,
        read_s=config.step_ms / 1e3,
        states=HiddenRows(loaded.model),
        offsets={},
    )
    return config, open_pools(opened, config), parts


def _without(config: EngineConfig, nbytes: int) -> EngineConfig:
    """Return the settings with so much less memory."""
    if config.memory is None:
        return config
    return replace(config, memory=config.memory - nbytes)


def open_draft_model(
    config: EngineConfig, name: str, loaded: LoadedModel
) -> tuple[EngineConfig, ModelDrafter]:
    """Open a draft model, and divide the KV budget between it and the model it drafts for.

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
    config = _without(config, draft.parameter_bytes)
    config, share = _shared_budget(config, draft.model, draft.dtype, loaded=loaded)
    log.info(
        "draft model %s: %s of weights, KV budget %s",
        *(name, size(draft.parameter_bytes), size(share)),
    )
    plain = EngineConfig(str(draft.path), block_size=config.block_size)
    segments = open_segments(draft.model)
    executor = open_executor(draft, plain, segments=segments, compiling=Compiling.BEHIND)
    return config, ModelDrafter(
        draft, executor, share, block_size=config.block_size, read_s=config.step_ms / 1e3
    )


def _shared_budget(
    config: EngineConfig, draft: LanguageModel, dtype: str, loaded: LoadedModel
) -> tuple[EngineConfig, int]:
    """Divide the KV budget so that both models hold sequences of the same number of tokens.

    Args:
        dtype: name of the draft model's type.

    Returns:
        The settings with the rest of the budget, and the draft model's bytes.
    """
    budget = kv_budget(config, loaded.parameter_bytes)
    tokens = config.max_context or loaded.context_length
    own, theirs = (
        sequence_bytes(model, DTYPES[name], config.block_size, format=format, tokens=tokens)
        for model, name, format in (
            (draft, dtype, KVFormat()),
            (loaded.model, loaded.dtype, config.kv_format),
        )
    )
    share = budget * own // (own + theirs)
    return replace(config, kv_memory=budget - share), share


def check_vocabulary(draft: LoadedModel, loaded: LoadedModel) -> None:
    """Raise `ModelError` unless both models mean the same text by each token id."""
    difference = vocabulary_difference(draft.path, loaded.path)
    if difference is not None:
        raise ModelError(
            f"the draft model {draft.path} has another vocabulary than {loaded.path}: token "
            f"{difference.id} is {difference.first!r} in one and {difference.second!r} in the "
            "other; choose a draft model of the same family",
            setting="speculate",
        )

"""Checks of a request's token ids and KV format, before the engine takes it.

Kernels do not check token ids: an unknown one would make them read beyond the embedding table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, RequestError
from quire.core.kv_choice import offered
from quire.core.kv_format import KVFormat
from quire.core.request import Classify, Embed, Request, Score, ScorePrompt
from quire.core.sampling_params import check_sampling
from quire.engine.invariance import check_invariant
from quire.engine.request_media import RequestMedia
from quire.models.base import LanguageModel


def check_request(
    request: Request,
    *,
    config: EngineConfig,
    model: LanguageModel,
    media: RequestMedia,
    formats: Sequence[KVFormat],
) -> None:
    """Raise `RequestError`, naming the field, if the engine cannot compute a request.

    The scheduler alone refuses requests for their length (`scheduler.limits`).

    Args:
        formats: the KV formats that a request may choose.
    """
    media.check(request)
    _check_task(request, model)
    _check_names(request, model, formats)
    check_sampling(request.sampling, model.vocab_size)
    check_invariant(config, request)


def positions_of(request: Request, model: LanguageModel) -> npt.NDArray[np.float32] | None:
    """Return the positions of a request's prompt, see `LanguageModel.positions`."""
    if not model.token_types:
        return model.positions(request.prompt, request.media)
    count = len(request.prompt)
    types = request.token_types or (0,) * count
    return np.array([range(count), types], np.float32)


def _check_task(request: Request, model: LanguageModel) -> None:
    task, types = request.task, request.token_types
    if model.bidirectional and not isinstance(task, Embed | Classify):
        raise RequestError(
            "model: it is an encoder, which embeds and scores texts and generates none",
            param="model",
            code="unsupported_model",
        )
    if isinstance(task, Classify) and not model.labels:
        raise RequestError("task: the model has no classification head", param="task")
    if types and (len(types) != len(request.prompt) or max(types) >= max(1, model.token_types)):
        raise RequestError(
            f"token_types: {len(types)} for {len(request.prompt)} tokens, of {model.token_types} "
            "kinds",
            param="token_types",
        )


def _check_names(request: Request, model: LanguageModel, formats: Sequence[KVFormat]) -> None:
    if request.prompt:
        _check_ids("prompt", request.prompt, model.embedded_tokens)
    if request.stop_token_ids:
        # A model's own may lie outside of its vocabulary, as files of some models have them.
        _check_ids("stop_token_ids", request.stop_token_ids, 1 << 31)
    if request.thinking is not None:
        _check_ids("thinking.end_ids", request.thinking.end_ids, model.vocab_size)
    if isinstance(request.task, Score):
        _check_ids("labels", request.task.labels, model.vocab_size)
    if isinstance(request.task, ScorePrompt):
        _check_ids("targets", request.task.targets, model.vocab_size)
    if request.kv_format is not None:
        _check_format(request.kv_format.name, [each.name for each in formats])


_USUAL_BLOCK = 64
"""A block size that every format supports."""


def check_default(format: KVFormat, formats: Sequence[KVFormat], block_size: int) -> None:
    """Raise `ModelError` if the server's own KV format does not fit its block size.

    A format registered by an extension checks that for itself.
    """
    names = [each.name for each in formats]
    elsewhere = {each.name for each in offered(_USUAL_BLOCK)}
    if format.name in elsewhere and format.name not in names:
        raise ModelError(
            f"kv_format: {format.name} is not possible in blocks of {block_size} tokens; "
            f"possible are {', '.join(names)}"
        )


def _check_ids(field: str, ids: Collection[int], count: int) -> None:
    wrong: list[int] = []
    if set(map(type, ids)) - {int}:  # a prompt may have 100,000 tokens
        wrong = [each for each in ids if type(each) is not int]
    if ids and not wrong:
        wrong = [each for each in (min(ids), max(ids)) if not 0 <= each < count]
    if wrong or not ids:
        said = wrong[0] if wrong else "none"
        raise RequestError(
            f"{field}: at least one token id from 0 to {count - 1}, not {said}",
            param=field,
            code="invalid_value",
        )


def _check_format(name: str, offered: Sequence[str]) -> None:
    if name not in offered:
        raise RequestError(
            f"kv_format: {name} is none of {', '.join(offered)}",
            param="kv_format",
            code="invalid_value",
        )

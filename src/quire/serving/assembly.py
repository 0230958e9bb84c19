"""Builds a model's service from settings and the engine's client."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.config import ServerConfig
from quire.core.request import SamplingParams
from quire.media.fetch import FetchPolicy
from quire.media.kinds import limits_of, open_processors
from quire.serving.constraints import Constraints
from quire.serving.interface import EngineClient
from quire.serving.media import MediaLoader
from quire.serving.model_files import stamp_of
from quire.serving.pooling import read_pooling
from quire.serving.prompts import Prompts
from quire.serving.sampling_defaults import overridden, recommended
from quire.serving.sandbox import BuilderOpening, GrammarSandbox
from quire.serving.service import Service
from quire.serving.submission import Submission
from quire.serving.vectors import Vectors
from quire.text.controls import Controls, control_tokens
from quire.text.dialects import NONE, choose_dialect
from quire.text.dialects.base import Dialect, vocabulary_of
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.media.processors.base import MediaProcessor

log = logging.getLogger("quire.media")


def _controls(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    dialect: Dialect,
    media_tokens: frozenset[str],
    *,
    allow: bool,
) -> Controls:
    """Return the controls that keep control tokens out of clients' text.

    Args:
        media_tokens: placeholders of media; never allowed in text, even if other control tokens
            are.
    """
    texts = frozenset() if allow else control_tokens(tokenizer, template.source)
    texts |= media_tokens
    # Reasoning that stands in a message of its own ends with the mark that ends any message.
    reasoning = dialect.reasoning if dialect.frame is None else None
    return Controls(tokenizer, texts, reasoning)


def _media_tokens(
    folder: Path, tokenizer: Tokenizer, processors: Mapping[str, MediaProcessor]
) -> dict[str, str]:
    """Return the tokens that mark media in the template, by kind. Kinds without such a token are
    logged and left out.
    """
    texts = {}
    for kind, processor in processors.items():
        token = processor.placeholders.token
        text = tokenizer.token_text(token)
        if text is None:
            lacking = "%s: the tokenizer has no token %d, which marks %s; serving without it"
            log.warning(lacking, folder, token, kind)
        else:
            texts[kind] = text
    return texts


def _loader(
    processors: Mapping[str, MediaProcessor], tokens: Mapping[str, str], config: ServerConfig
) -> MediaLoader:
    policy = FetchPolicy(
        config.allow_media_hosts,
        tuple(Path(each) for each in config.media_folders),
        timeout_s=config.media_timeout_s,
    )
    return MediaLoader(processors, tokens, policy, limits=limits_of(config.media_limits))


def assemble(
    client: EngineClient, name: str, config: ServerConfig, tokenizer: Tokenizer | None = None
) -> Service:
    """Return the service for a model that an engine has opened.

    Args:
        name: what clients call the model.
        tokenizer: the model's; None opens it in this process.

    Raises:
        ModelError: a file is missing or cannot be understood, or `config.dialect` names none.
    """
    folder = Path(client.info.path)
    stamp = stamp_of(folder)
    tokenizer = tokenizer or Tokenizer.open(folder)
    template = ChatTemplate.open(folder, tokenizer.special_tokens)
    dialect = choose_dialect(template.source, client.info.model_type, config.dialect)
    vocabulary = vocabulary_of(tokenizer)
    own = recommended(folder) if config.sampling_defaults == "model" else SamplingParams()
    processors = open_processors(folder, client.info.modalities)
    media_tokens = _media_tokens(folder, tokenizer, processors)
    media = _loader({kind: processors[kind] for kind in media_tokens}, media_tokens, config)
    prompts = Prompts(
        lambda: client.info,
        tokenizer,
        template,
        media=media,
        controls=_controls(
            tokenizer,
            template,
            dialect,
            media_tokens=frozenset(media_tokens.values()) | media.places.marks,
            allow=config.allow_special_tokens,
        ),
        drop_volatile=config.drop_volatile_headers,
        default_system=config.default_system,
    )
    opening = BuilderOpening(folder, dialect.name, client.info.vocab_size, stamp=stamp)
    sandbox = GrammarSandbox(opening)
    constraints = Constraints(dialect, vocabulary, prompts, sandbox=sandbox)
    submission = Submission(
        client,
        tokenizer,
        vocabulary,
        dialect=dialect,
        plain=NONE,
        constraints=constraints,
        default_max_tokens=config.default_max_tokens,
        deadline_s=config.request_deadline_s,
    )
    sampling = overridden(own, config.sampling_overrides)
    return Service(
        name,
        client,
        prompts,
        constraints=constraints,
        submission=submission,
        vectors=Vectors(client, read_pooling(folder), deadline_s=config.request_deadline_s),
        sampling=sampling,
    )

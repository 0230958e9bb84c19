"""From settings to a service that answers: the engine's process, and what the HTTP side needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.core.config import ServerConfig
from quire.core.errors import ModelError
from quire.core.request import SamplingParams
from quire.media.fetch import FetchPolicy
from quire.media.processors import MediaProcessor, open_processors
from quire.serving.constraints import Constraints
from quire.serving.interface import EngineClient
from quire.serving.media import MediaLimits, MediaLoader
from quire.serving.prompts import Prompts
from quire.serving.sampling_defaults import overridden, recommended
from quire.serving.sandbox import BuilderOpening, GrammarSandbox
from quire.serving.service import Service
from quire.serving.submission import Submission
from quire.text.controls import Controls, control_tokens
from quire.text.dialects import NONE, choose_dialect
from quire.text.dialects.base import Dialect, vocabulary_of
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer


def _controls(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    dialect: Dialect,
    media_tokens: frozenset[str],
    *,
    allow: bool,
) -> Controls:
    """What keeps clients' text from becoming control tokens.

    Args:
        media_tokens: those that stand for media; never text, even if others are allowed.
    """
    texts = frozenset() if allow else control_tokens(tokenizer, template.source)
    texts |= media_tokens
    # Reasoning that stands in a message of its own ends with the mark that ends any message.
    reasoning = dialect.reasoning if dialect.frame is None else None
    return Controls(tokenizer, texts, reasoning)


def _media_tokens(
    folder: Path, tokenizer: Tokenizer, processors: Mapping[str, MediaProcessor]
) -> frozenset[str]:
    """The tokens by which the model's template marks media.

    Raises:
        ModelError: the tokenizer lacks one.
    """
    texts = set()
    for kind, processor in processors.items():
        token = processor.placeholders.token
        text = tokenizer.token_text(token)
        if text is None:
            raise ModelError(f"{folder}: the tokenizer has no token {token}, which marks {kind}s")
        texts.add(text)
    return frozenset(texts)


def _loader(processors: Mapping[str, MediaProcessor], config: ServerConfig) -> MediaLoader:
    policy = FetchPolicy(
        config.allow_media_hosts,
        tuple(Path(each) for each in config.media_folders),
        config.max_image_bytes,
        config.media_timeout_s,
    )
    return MediaLoader(processors, policy, MediaLimits(config.max_images, config.max_image_pixels))


def assemble(client: EngineClient, name: str, config: ServerConfig) -> Service:
    """The service for a model that an engine has opened.

    Args:
        name: what clients call the model.

    Raises:
        ModelError: the folder lacks a tokenizer, a file of it cannot be understood, or
            `config.dialect` names none.
    """
    folder = Path(client.info.path)
    tokenizer = Tokenizer.open(folder)
    template = ChatTemplate.open(folder, tokenizer.special_tokens)
    dialect = choose_dialect(template.source, client.info.model_type, config.dialect)
    vocabulary = vocabulary_of(tokenizer)
    own = recommended(folder) if config.sampling_defaults == "model" else SamplingParams()
    processors = open_processors(folder, client.info.modalities)
    media_tokens = _media_tokens(folder, tokenizer, processors)
    media = _loader(processors, config)
    prompts = Prompts(
        lambda: client.info,
        tokenizer,
        template,
        media,
        _controls(tokenizer, template, dialect, media_tokens, allow=config.allow_special_tokens),
        drop_volatile=config.drop_volatile_headers,
    )
    sandbox = GrammarSandbox(BuilderOpening(folder, dialect.name, client.info.vocab_size))
    constraints = Constraints(dialect, vocabulary, prompts, sandbox)
    submission = Submission(
        client,
        tokenizer,
        vocabulary,
        dialect,
        NONE,
        media,
        constraints,
        default_max_tokens=config.default_max_tokens,
        deadline_s=config.request_deadline_s,
    )
    sampling = overridden(own, config.sampling_overrides)
    return Service(name, client, prompts, constraints, submission, sampling)

"""The engine's description of itself: the served model, counters and gauges."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.block_keys import BlockNames


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A description of the served model.

    Attributes:
        path: the folder that holds tokenizer and template.
        model_type: as `config.json` says.
        vocab_size: columns of the logits.
        context_length: the most tokens of prompt and answer together.
        generates: whether the model generates text; encoders embed and score only.
        token_types: number of kinds of tokens that it tells apart, such as those of a pair's texts;
            0 if none.
        labels: number of logits of its classification head; 0 without one.
        trained_length: how many of these tokens the model was trained on; None means all.
        dtype: type of activations, by MLX's name.
        device: name and architecture, for people.
        kv_memory: bytes that KV blocks may take.
        kv_formats: names of the formats that a request may choose.
        modalities: "text", and the kinds of media that prompts may hold.
        parameters: number of the weights; 0 if it is not known.
        weight_bytes: memory that the weights hold.
        blocks: how KV blocks are named.
        kv_table: lines of the start-up table: layers, format, bytes a token.
    """

    path: str
    model_type: str
    vocab_size: int
    context_length: int
    dtype: str
    device: str
    kv_memory: int
    kv_formats: tuple[str, ...] = ("plain",)
    blocks: BlockNames = field(default_factory=BlockNames)
    kv_table: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ("text",)
    parameters: int = 0
    weight_bytes: int = 0
    trained_length: int | None = None
    generates: bool = True
    labels: int = 0
    token_types: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start, and current gauges. Sizes are in bytes.

    Attributes:
        running: number of sequences that hold blocks.
        waiting: number of sequences that wait for room.
        prompt_tokens, cached_tokens: prompt tokens of all sequences started so far, and how many of
            them came from the prefix cache.
        preemptions: number of preemptions.
        kv_budget: bytes that KV blocks may take.
        kv_used: (group and format, bytes of blocks that live sequences hold).
        kv_kept: (group and format, bytes of blocks kept for reuse).
        kv_block_bytes: (group and format, bytes of one block).
        memory: (what, bytes): see `Device.memory`.
        reuse_misses: (reason, requests).
        disk: (what, number) of the disk tier, empty without one: bytes of its file; blocks written,
            dropped (no room, no time), hits and misses of those it was asked for.
        finished: (`FinishReason`, sequences).
        drafts: (drafter, number of drafted tokens that steps verified).
        accepted_drafts: (drafter, number of these that were accepted).
        work_seconds: of a split model, the seconds that each rank took for the same work when it
            was last measured; a rank whose device is slow takes longer.
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    kv_budget: int = 0
    kv_used: tuple[tuple[str, int], ...] = ()
    kv_kept: tuple[tuple[str, int], ...] = ()
    kv_block_bytes: tuple[tuple[str, int], ...] = ()
    memory: tuple[tuple[str, int], ...] = ()
    reuse_misses: tuple[tuple[str, int], ...] = ()
    disk: tuple[tuple[str, int], ...] = ()
    finished: tuple[tuple[str, int], ...] = ()
    drafts: tuple[tuple[str, int], ...] = ()
    accepted_drafts: tuple[tuple[str, int], ...] = ()
    work_seconds: tuple[float, ...] = ()

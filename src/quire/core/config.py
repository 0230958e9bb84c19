"""Settings, built once by the CLI from flags, variables and a file.

Below the CLI only `device/` reads the environment, for the locations of kernels and their
compilers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from quire.core.block_keys import BlockNames
from quire.core.hosts import Hosts
from quire.core.kv_format import KVFormat
from quire.core.mcp import McpServer
from quire.core.speculation import Speculation

CPU_KERNELS = (
    *("amx", "vnni", "avx512", "avxvnni", "avx2"),
    *("i8mm", "dotprod", "neon", "scalar"),
)
"""Instruction sets of the compiled CPU kernels, fastest first."""


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The disk tier, for blocks that are evicted from memory.

    Attributes:
        path: a folder; made if missing.
        max_bytes: the most that the folder may hold.
        neighbours: whether the folders beside this one are those of other engines with the same
            settings, whose blocks are read as well.
    """

    path: str
    max_bytes: int
    neighbours: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the engine's process.

    Attributes:
        model: a folder, or a hub id.
        dtype: "" keeps the checkpoint's on a GPU and computes in float32 on a CPU.
        adapter: a folder or hub id of a LoRA adapter that is merged into the weights.
        adapters: (name, folder or hub id) of LoRA adapters that requests may name.
        kv_memory: bytes for all KV blocks, live and cached; None means a fraction of the free
            memory.
        kv_format: KV format of requests that name none.
        kv_skip_layers: layers that packed formats leave plain, by index; None is the default, see
            `cache.formats.skips`.
        block_size: tokens per KV block.
        max_sequences: sequences that run at once; others wait.
        max_context: the most tokens of a sequence; None means the model's limit.
        step_ms: the time aimed at for what a step reads of prompts, at most. A step that also
            generates, while one or two prompts are read, aims at `stall_factor` times the duration
            of one that only generates; see `scheduler.prefill_budget`, which also says when a
            chunk is worth more time: one that fills a larger CUDA graph, up to twice as much.
        stall_factor: see `step_ms`.
        max_step_tokens: the most rows of a step, whatever step times allow.
        blas: what multiplies on a CPU: "auto" is the compiled kernels where they were built, else
            OpenBLAS; "openblas"; or "mlx", the slow products that MLX carries.
        kernels: the instruction set of the compiled CPU kernels, one of `CPU_KERNELS`; "auto" is
            the fastest that this processor has, "off" does without the kernels.
        activation_bits: the bits, 8 or 16, to which the CPU kernels round activations before they
            multiply packed weights.
        threads: threads of a CPU kernel; 0 means one for every core that this process may use.
        prefix_cache: whether computed blocks are kept and shared.
        disk: the disk tier for blocks evicted from memory; None for none.
        batch_invariant: a request's logits have the same bits alone and in any batch.
        stop_on_loop: stop an answer after this many exact repeats of a cycle; 0 is never. None is
            only where a grammar binds the answer, after many.
        speculate: which drafters may draft for requests that do not choose.
        draft_model: folder or hub id of a smaller model of the same vocabulary, which drafts; None
            for none.
        memory: bytes for weights and KV blocks together; None means the machine's memory.
        reserved: bytes of free memory reserved for other engines of this server.
        ranks: number of processes that the model is split over.
        hosts: where these run; None is this machine.
        pipeline: weights by which the model's layers are divided among the processes; empty for
            weights by their memory; None splits each layer instead.
        sharers: engines of this server that may yet be opened, this one included; what is free for
            KV blocks is split among them.
    """

    model: str
    dtype: str = ""
    adapter: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    kv_memory: int | None = None
    kv_format: KVFormat = field(default_factory=KVFormat)
    kv_skip_layers: tuple[int, ...] | None = None
    block_size: int = 64
    max_sequences: int = 64
    max_context: int | None = None
    step_ms: float = 60.0
    stall_factor: float = 2.0
    max_step_tokens: int = 2048
    blas: Literal["auto", "openblas", "mlx"] = "auto"
    kernels: str = "auto"
    activation_bits: Literal[8, 16] = 16
    threads: int = 0
    prefix_cache: bool = True
    disk: DiskConfig | None = None
    batch_invariant: bool = False
    stop_on_loop: int | None = None
    speculate: Speculation = "auto"
    draft_model: str | None = None
    memory: int | None = None
    reserved: int = 0
    ranks: int = 1
    hosts: Hosts | None = None
    pipeline: tuple[int, ...] | None = None
    sharers: int = 1

    def block_names(self, fingerprint: str, skipped: tuple[int, ...]) -> BlockNames:
        """Return the names of a model's blocks; see `BlockNames` for the arguments."""
        own = self.block_size, self.kv_format, skipped, self.activation_bits
        return BlockNames(fingerprint, *own)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one API key.

    Attributes:
        requests_per_minute, tokens_per_minute: None means no limit. Tokens are those of prompts,
            cached or not, and of answers.
        share: weight of the key when the engine's places and rows are divided.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP side.

    Attributes:
        host, port: address that the server listens on.
        served_name: the model's name in requests and answers.
        also_named: further names by which clients may ask for it, such as those that an agent has
            built in.
        adapters: names of LoRA adapters, which requests may name as their model.
        adapter_folder: folder of adapters that may be loaded while serving; None for none.
        api_keys: any of them opens all routes; empty asks for none. Several stand for users who
            see nothing of each other.
        key_limits: limits of keys that have their own.
        default_limits: limits of every other key, and of a server without keys.
        strict_fields: refuse request fields that neither a schema nor another server knows.
        max_concurrent: the most requests in flight; more get a 429.
        max_body_bytes: the most bytes of a body; more get a 413.
        max_messages: the most messages of a conversation; more get a 400.
        media_limits: the operator's, by kind of media and name of the limit (`files`, or a field of
            `FileLimits`); the others are the kind's own.
        allow_media_hosts: whether http(s) URLs are fetched, from public addresses.
        media_folders: where `file://` URLs may read; empty is nowhere.
        media_timeout_s: for fetching one item, redirects included.
        request_deadline_s: seconds after which a request ends with an error; None means never.
        engine_timeout_s: seconds without a sign of work from the engine after which requests in
            flight end with an error.
        restarts: the most restarts of a failed engine within ten minutes; after further failures
            the server ends if no other model can answer.
        stop_grace_s: seconds for answers in flight when the server is told to stop.
        cors_origins: origins of web pages that may send requests; empty for none, "*" for all.
        allowed_hosts: names that the Host header may hold beside this machine's own; "*" is all.
        share_prefixes: whether API keys share cached prefixes.
        metrics_key: opens the metrics of all keys, and nothing else.
        dialect: name of the grammar of reasoning and tool calls; None chooses it by the template.
        default_system: system message of conversations that bring none; empty adds none.
        default_max_tokens: default limit of answers in tokens; None means all that the context
            holds.
        drop_volatile_headers: cut the parts of agents' prompts that change with each request.
        allow_special_tokens: control tokens that clients spell in a conversation become tokens.
        signing_key: signs the reasoning that clients send back; None draws one for this process, so
            that no reasoning from before a restart is accepted.
        stored_responses: the most responses, stored chats and conversations kept for each key.
        stored_response_bytes: the most bytes of these together, with their conversations.
        keep_streams_s: how long a stream that its request named goes on without a reader, and is
            kept after its end; 0 keeps none.
        sampling_defaults: whose hold for what a request does not name: those that the model's
            `generation_config.json` recommends, or OpenAI's.
        sampling_overrides: the operator's, by the name of the parameter.
        files: folder of uploaded files and batches; None turns them off.
        files_bytes: the most bytes of the files of all API keys together.
        page: whether browsers get a page to chat with the model and to watch the server.
        otlp_endpoint: URL of an OpenTelemetry collector that gets a trace of each request by
            OTLP/HTTP; None is nobody.
        log_level: by the name that `logging` has for it, in lower case.
        log_format: lines for people, or one JSON object a line.
        mcp_servers: MCP servers whose tools the page, and any client with a key, may call.
        mcp: whether chat requests may name these servers as tools, whose calls are made here.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    also_named: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    adapter_folder: str | None = None
    api_keys: tuple[str, ...] = ()
    key_limits: Mapping[str, KeyLimits] = field(default_factory=dict)
    default_limits: KeyLimits = KeyLimits()
    strict_fields: bool = True
    max_concurrent: int = 1024
    max_body_bytes: int = 32 << 20
    max_messages: int = 4096
    media_limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    allow_media_hosts: bool = False
    media_folders: tuple[str, ...] = ()
    media_timeout_s: float = 20.0
    request_deadline_s: float | None = None
    engine_timeout_s: float = 30.0
    restarts: int = 5
    stop_grace_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    share_prefixes: bool = False
    metrics_key: str | None = None
    dialect: str | None = None
    default_system: str = ""
    default_max_tokens: int | None = None
    drop_volatile_headers: bool = True
    allow_special_tokens: bool = False
    signing_key: str | None = None
    stored_responses: int = 1024
    stored_response_bytes: int = 64 << 20
    keep_streams_s: float = 300.0
    sampling_defaults: Literal["model", "openai"] = "model"
    sampling_overrides: Mapping[str, float] = field(default_factory=dict)
    files: str | None = None
    files_bytes: int = 10 << 30
    page: bool = True
    otlp_endpoint: str | None = None
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    mcp_servers: tuple[McpServer, ...] = ()
    mcp: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One of a server's models, with its settings.

    Attributes:
        engine: the settings of its engine.
        serving: the server's settings as they are for this model; `served_name` is set.
        pinned: whether it is loaded at the start and never unloaded.
        idle_unload_s: seconds without a request after which it is unloaded; None means never.
    """

    engine: EngineConfig
    serving: ServerConfig
    pinned: bool = False
    idle_unload_s: float | None = None

    @property
    def name(self) -> str:
        """The model's id in the API: `served_name`, or the given path."""
        return self.serving.served_name or self.engine.model

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use for it."""
        return (self.name, *self.serving.also_named, *self.serving.adapters)

    def with_adapter(self, name: str, place: str | None) -> ModelConfig:
        """Return the settings with an adapter that requests may name; without it if `place` is
        None.
        """
        adapters = tuple(each for each in self.engine.adapters if each[0] != name)
        names = tuple(each for each in self.serving.adapters if each != name)
        if place is not None:
            adapters, names = (*adapters, (name, place)), (*names, name)
        return replace(
            self,
            engine=replace(self.engine, adapters=adapters),
            serving=replace(self.serving, adapters=names),
        )

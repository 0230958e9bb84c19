"""Options of `quire serve` that concern all its models."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.cli.keys import KeyOptions, key_in
from quire.cli.mcp_file import mcp_servers
from quire.cli.media_options import MediaOptions
from quire.cli.model_options import ModelOptions
from quire.cli.settings import Options
from quire.cli.values import (
    Bytes,
    Count,
    CountOrAuto,
    File,
    Flag,
    Folder,
    Host,
    HttpUrl,
    Model,
    Names,
    Origins,
    Port,
    Seconds,
)
from quire.core.config import ServerConfig

_SERVER = ServerConfig()


class SharedOptions(Options):
    """Options that all models of a server share."""

    title: ClassVar[str] = "several models"

    pin: Names = Field(
        (), description="a model that is loaded at start and never unloaded; may be given again"
    )
    memory: Bytes | None = Field(
        None,
        description="memory of all loaded models together, weights and KV blocks; default: "
        "what is free",
    )


class ScaleOptions(Options):
    """Options for the number of engines that serve the model."""

    title: ClassVar[str] = "scale"

    replicas: CountOrAuto | None = Field(
        None,
        description="number of engines, started through Ray on this machine (pip install "
        "'quire-serve[ray]'), one a GPU if there are any; auto starts and ends them by load; "
        "default: one engine, "
        "without Ray",
    )
    max_replicas: Count = Field(8, description="maximum number of engines of --replicas auto")


class AccessOptions(Options):
    """Options for who may send requests, and what each may see."""

    title: ClassVar[str] = "access"

    allow_anyone: bool = Field(
        False, description="allow other machines to connect without an API key"
    )
    share_prefixes: bool = Field(
        False,
        description="share the prefix cache between API keys; each can then find out how far "
        "its prompts match others'",
    )
    metrics_key_file: File | None = Field(
        None,
        description="API key for /metrics only, which shows all keys' requests; other keys "
        "see their own",
    )
    cors_origin: Origins = Field(
        (),
        description="origin whose web pages may call this server; may be given again; "
        "default: none",
    )
    allowed_host: Annotated[Names, Flag("NAME", again=True, former="--allowed-hosts")] = Field(
        (),
        description="host name that clients may use for this server, * for any; may be given "
        "again; this machine's names and addresses always work",
    )
    signing_key_file: File | None = Field(
        None,
        description="file with the key that signs reasoning, so that clients can send it back "
        "after a restart",
    )


class LimitOptions(Options):
    """Limits on requests."""

    title: ClassVar[str] = "limits"

    max_concurrent: Count = Field(
        _SERVER.max_concurrent,
        description="maximum number of requests in flight; further ones get a 429",
    )
    request_timeout: Seconds | None = Field(
        None, description="time limit of a request; default: none"
    )
    stop_grace: Seconds = Field(
        _SERVER.stop_grace_s,
        description="time for answers in flight to finish when the server is stopped",
    )
    engine_timeout: Seconds = Field(
        _SERVER.engine_timeout_s,
        ge=1,  # steps take a part of a second, and so may a message
        description="time without a sign of work from the engine, after which requests get a 503",
    )
    restarts: int = Field(
        _SERVER.restarts,
        ge=0,
        le=1000,
        description="how often within ten minutes a model's engine may fail and be started anew; "
        "after one more failure the server ends with status 1, unless another model can answer",
    )
    max_body: Bytes = Field(_SERVER.max_body_bytes, description="maximum size of a request's body")
    max_messages: Count = Field(
        _SERVER.max_messages, description="maximum number of messages in a request"
    )
    stored_responses: Count = Field(
        _SERVER.stored_responses,
        description="number of responses, stored chats and conversations kept per API key",
    )
    files: Folder | None = Field(
        None,
        description="folder of uploaded files and batches (/v1/files, /v1/batches, "
        "/v1/messages/batches); a batch continues after a restart; default: disabled",
    )
    files_bytes: Bytes = Field(
        _SERVER.files_bytes,
        description="disk space of the files below --files, shared evenly among API keys",
    )
    adapter_folder: Folder | None = Field(
        None,
        description="folder whose LoRA adapters may be loaded and unloaded while the server runs "
        "(/v1/load_lora_adapter); default: none",
    )
    keep_streams: Annotated[float, Flag("SECONDS")] = Field(
        _SERVER.keep_streams_s,
        ge=0,
        le=86400,
        description="time that a stream named with x-quire-stream continues without a reader, "
        "and is kept after its end; 0 keeps none",
    )


class ServerOptions(
    ModelOptions,
    SharedOptions,
    ScaleOptions,
    KeyOptions,
    AccessOptions,
    LimitOptions,
    MediaOptions,
):
    """All options of a server."""

    models: Annotated[
        tuple[Model | dict[str, Any], ...], Flag("MODEL", positional=True, several=True)
    ] = Field(
        (),
        description="folder, hub id or quire-demo, or NAME=MODEL to set the name for clients; "
        "default: quire-demo, the embedded demonstration model",
    )
    host: Host = Field(
        _SERVER.host,
        min_length=1,
        description="address to listen on, or unix:PATH for a Unix socket; "
        f"default: {_SERVER.host}, this machine only",
    )
    port: Port = Field(_SERVER.port, description="port to listen on; 0: a free one")
    served_name: Annotated[str | None, Flag("NAME")] = Field(
        None, description="the model's name for clients"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level that is logged"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="format of log lines; json: one object a line"
    )
    otlp_endpoint: HttpUrl | None = Field(
        default_factory=lambda: os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None,
        description="an OpenTelemetry collector that gets a trace of each request by OTLP/HTTP, "
        "such as http://localhost:4318; default: $OTEL_EXPORTER_OTLP_ENDPOINT, else none",
    )
    ignore_unknown_fields: bool = Field(
        False,
        description="ignore unknown request fields instead of refusing them; answers name what was "
        "ignored",
    )
    mcp_servers: File | None = Field(
        None,
        description="file of MCP servers in desktop clients' format (mcp.json); the page offers "
        "their tools to models; every client can call them; needs the extra [mcp]; "
        "default: none",
    )
    mcp: bool = Field(
        False,
        description="with --mcp-servers: requests for chat completions, responses and messages may "
        "name these servers as tools, and have the calls made here",
    )
    no_page: bool = Field(False, description="disable the web page at / and /docs")

    def server_config(self) -> ServerConfig:
        """Return the HTTP side's settings, except those of a single model (see `model_configs`).

        Raises:
            QuireError: a file cannot be read, or a folder does not exist.
        """
        keys = self.accepted_keys()
        return ServerConfig(
            host=self.host,
            port=self.port,
            api_keys=tuple(keys),
            key_limits=keys,
            default_limits=self.default_limits,
            strict_fields=not self.ignore_unknown_fields,
            max_concurrent=self.max_concurrent,
            max_body_bytes=self.max_body,
            max_messages=self.max_messages,
            **self.media_settings(),
            request_deadline_s=self.request_timeout,
            engine_timeout_s=self.engine_timeout,
            restarts=self.restarts,
            stop_grace_s=self.stop_grace,
            cors_origins=self.cors_origin,
            allowed_hosts=self.allowed_host,
            share_prefixes=self.share_prefixes,
            metrics_key=key_in(self.metrics_key_file, "--metrics-key-file"),
            signing_key=key_in(self.signing_key_file, "--signing-key-file"),
            stored_responses=self.stored_responses,
            adapter_folder=None if self.adapter_folder is None else str(self.adapter_folder),
            files=None if self.files is None else str(self.files),
            files_bytes=self.files_bytes,
            keep_streams_s=self.keep_streams,
            page=not self.no_page,
            otlp_endpoint=self.otlp_endpoint,
            log_level=self.log_level,
            log_format=self.log_format,
            mcp_servers=mcp_servers(self.mcp_servers),
            mcp=self.mcp,
        )

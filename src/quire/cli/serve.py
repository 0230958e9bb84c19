"""`quire serve`: models behind HTTP."""

from __future__ import annotations

import argparse
import logging
import os

from quire.cli.keys import add_server_key_arguments, key_in, server_keys
from quire.cli.kv_flags import add_kv_arguments
from quire.cli.media_flags import add_media_arguments, media_settings
from quire.cli.offers import offers
from quire.cli.values import at_least, byte_count, duration, http_url, number, port, positive
from quire.core.config import EngineConfig, ServerConfig
from quire.core.logs import FORMATS, write_logs
from quire.sampling.loops import MIN_REPEATS
from quire.serving.sampling_defaults import NAMES


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve models over HTTP",
        description="Serves models over HTTP: OpenAI's chat completions, completions and "
        "responses, Anthropic's messages. One model is loaded at the start; of several each when "
        "it is first asked for.",
    )
    parser.set_defaults(tables=[], options={})  # of the configuration file, see `offers`
    add, defaults = parser.add_argument, ServerConfig()
    add(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a folder or a hub id, or NAME=MODEL for what clients call it; the embedded "
        "demonstration if left out",
    )
    add("--host", default=defaults.host, help="default: %(default)s, this machine alone")
    add("--port", type=port, default=defaults.port, help="default: %(default)s; 0 takes a free one")
    add("--served-name", metavar="NAME", help="what clients call the model")
    add(
        "--also-named",
        action="append",
        default=[],
        metavar="NAME",
        help="another name for it, such as one that an agent has built in; may be given again",
    )
    add("--dialect", help="how answers spell reasoning and tool calls, or none; default: by model")
    add("--max-tokens", type=positive, metavar="N", help="for requests that name no limit")
    levels = ("debug", "info", "warning", "error")
    add("--log-level", default=defaults.log_level, choices=levels, help="what is logged at least")
    add("--log-format", default=defaults.log_format, choices=FORMATS, help="json: an object a line")
    add(
        "--otlp-endpoint",
        type=http_url,
        default=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None,
        metavar="URL",
        help="an OpenTelemetry collector that gets a trace of each request by OTLP/HTTP, such as "
        "http://localhost:4318; default: $OTEL_EXPORTER_OTLP_ENDPOINT, else none",
    )
    add(
        "--keep-volatile",
        action="store_true",
        help="do not cut the parts of agents' prompts that change with every request",
    )
    add(
        "--ignore-unknown-fields",
        action="store_true",
        help="for clients that send fields nobody knows and cannot be changed; answers name them",
    )
    add("--no-page", action="store_true", help="no page for browsers at /, no /docs")
    _add_sampling_arguments(parser.add_argument_group("sampling"))
    _add_engine_arguments(parser.add_argument_group("engine"))
    _add_cache_arguments(parser.add_argument_group("KV cache"))
    _add_models_arguments(parser.add_argument_group("several models"))
    _add_access_arguments(parser.add_argument_group("access"))
    _add_limit_arguments(parser.add_argument_group("limits"))
    add_media_arguments(parser.add_argument_group("images, sound, video and documents"))


def _add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sampling-defaults",
        default=ServerConfig().sampling_defaults,
        choices=("model", "openai"),
        help="whose hold for what a request does not name: those that the model's "
        "generation_config.json recommends, or OpenAI's; default: %(default)s",
    )
    for name in NAMES:
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=at_least(0) if name == "top_k" else number,
            metavar="N",
            help="for requests that name none, instead of that default",
        )


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    add, defaults = group.add_argument, EngineConfig("")
    add(
        "--dtype",
        default=defaults.dtype,
        choices=("float32", "float16", "bfloat16"),
        help="compute type; by default the checkpoint's on a GPU, float32 on a CPU",
    )
    add(
        "--adapter",
        metavar="FOLDER",
        help="a LoRA adapter as PEFT saves it, or its hub id; merged into the weights",
    )
    add(
        "--blas",
        default=defaults.blas,
        choices=("auto", "openblas", "mlx"),
        help="what multiplies on a CPU: auto is our own kernels where they were built (a row's "
        "bits are the same in any company), else OpenBLAS; mlx is MLX's own, slow",
    )
    add(
        "--max-context",
        type=positive,
        metavar="N",
        help="tokens of prompt and answer together; default: the model's own limit",
    )
    add(
        "--max-sequences",
        type=positive,
        default=defaults.max_sequences,
        metavar="N",
        help="that run at once, others wait; default: %(default)s",
    )
    add(
        "--step-ms",
        type=duration,
        default=defaults.step_ms,
        metavar="MS",
        help="time aimed at for a step that only reads prompts; default: %(default)s",
    )
    add(
        "--stop-on-loop",
        type=at_least(MIN_REPEATS, "fewer repeats are no loop"),
        default=defaults.stop_on_loop,
        metavar="N",
        help=f"end an answer that repeats a cycle of tokens N times, at least {MIN_REPEATS}",
    )


def _add_cache_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-memory",
        type=byte_count,
        metavar="BYTES",
        help="for all KV blocks, e.g. 8GB; default: a share of what is free",
    )
    add_kv_arguments(group)
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt from its beginning"
    )
    group.add_argument(
        "--kv-disk", metavar="DIR", help="where evicted KV blocks go; they survive a restart"
    )
    group.add_argument(
        "--kv-disk-size", type=byte_count, default="20GB", metavar="BYTES", help="default: 20GB"
    )


def _add_models_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--idle-unload",
        type=duration,
        metavar="SECONDS",
        help="without a request, after which a model is unloaded; default: never",
    )
    add(
        "--pin",
        action="append",
        default=[],
        metavar="NAME",
        help="a model that is loaded at the start and stays; may be given again",
    )
    add(
        "--memory",
        type=byte_count,
        metavar="BYTES",
        help="for all loaded models together, weights and KV blocks; default: what is free",
    )


def _add_access_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_server_key_arguments(group)
    add(
        "--allow-anyone",
        action="store_true",
        help="serve beyond this machine without a key; meant, not forgotten",
    )
    add(
        "--allow-special-tokens",
        action="store_true",
        help="take control tokens spelled in messages, such as <|im_end|>, as tokens, not as text",
    )
    add(
        "--share-prefixes",
        action="store_true",
        help="let API keys reuse what others have computed, and see how far their prompts agree",
    )
    add(
        "--metrics-key-file",
        metavar="FILE",
        help="a key that opens /metrics alone, for all keys; each other one sees its own requests",
    )
    add(
        "--cors-origin",
        "--cors-origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages from there may ask; may be given again; default: none",
    )
    add(
        "--allowed-host",
        "--allowed-hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which clients reach this server, * for any; may be given again; this "
        "machine's own and addresses always work",
    )
    add(
        "--signing-key-file",
        metavar="FILE",
        help="signs the reasoning that clients send back, so that it is accepted after a restart",
    )


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    add, defaults = group.add_argument, ServerConfig()
    add(
        "--max-concurrent",
        type=positive,
        default=defaults.max_concurrent,
        metavar="N",
        help="requests in flight before others get a 429; default: %(default)s",
    )
    add("--request-timeout", type=duration, metavar="SECONDS", help="for one answer; default: none")
    add(
        "--stop-grace",
        type=duration,
        default=defaults.stop_grace_s,
        metavar="SECONDS",
        help="for answers in flight when the server is told to end; default: %(default)g",
    )
    add(
        "--engine-timeout",
        type=duration,
        default=defaults.engine_timeout_s,
        metavar="SECONDS",
        help="that the engine may be silent without working, before requests get a 503; "
        "default: %(default)g",
    )
    add("--max-body", type=byte_count, default="32MiB", metavar="BYTES", help="default: 32MiB")
    add(
        "--max-messages",
        type=positive,
        default=defaults.max_messages,
        metavar="N",
        help="of one request; default: %(default)s",
    )
    add(
        "--stored-responses",
        type=positive,
        default=defaults.stored_responses,
        metavar="N",
        help="answers of /v1/responses kept for each API key; default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    """Serves until interrupted; 1 if the engine broke down."""
    write_logs(args.log_level, args.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    server = server_config(args)
    offered = offers(args, server)
    # Here, because every command loads this module and no other needs a web server.
    from quire.api.server import serve
    from quire.api.shared.auth import check_exposure
    from quire.cli.loading import loading
    from quire.text.dialects import named

    check_exposure(server, allow_anyone=args.allow_anyone)
    for dialect in filter(None, (offer.serving.dialect for offer in offered)):
        named(dialect)  # a wrong name is known before the weights are loaded
    return serve(offered, server, memory=args.memory, told=loading(args.log_format))


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The HTTP side's settings, but for what is a model's own (see `offers`).

    Raises:
        QuireError: a file cannot be read, or a folder is none.
    """
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=server_keys(args),
        strict_fields=not args.ignore_unknown_fields,
        max_concurrent=args.max_concurrent,
        max_body_bytes=args.max_body,
        max_messages=args.max_messages,
        **media_settings(args),
        request_deadline_s=args.request_timeout,
        engine_timeout_s=args.engine_timeout,
        stop_grace_s=args.stop_grace,
        cors_origins=tuple(args.cors_origin),
        allowed_hosts=tuple(args.allowed_host),
        share_prefixes=args.share_prefixes,
        metrics_key=key_in(args.metrics_key_file, "--metrics-key-file"),
        signing_key=key_in(args.signing_key_file, "--signing-key-file"),
        stored_responses=args.stored_responses,
        page=not args.no_page,
        otlp_endpoint=args.otlp_endpoint,
        log_level=args.log_level,
        log_format=args.log_format,
    )

"""Options of one model: for all models of a server, or for one in its `[[models]]` table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from quire.cli.settings import Options
from quire.cli.short_names import resolve
from quire.cli.values import (
    Bytes,
    Count,
    CountOrAuto,
    Flag,
    Names,
    Numbers,
    Place,
    Places,
    Proportions,
    Seconds,
    Whole,
)
from quire.core.config import CPU_KERNELS, DiskConfig, EngineConfig
from quire.core.errors import QuireError, RequestError
from quire.core.hosts import Hosts, read_hosts
from quire.core.kv_choice import choose_format, offered
from quire.core.kv_format import KVFormat
from quire.core.sampling_params import LIMITS, MIN_REPEATS, MOST_TOKENS, check_repeats
from quire.core.speculation import check_speculate, speculation_of
from quire.device.cards import count_cards

_ENGINE = EngineConfig("")
_MOST_THREADS = 1024
_WITHOUT = "; for requests that do not set it, in place of --sampling-defaults"


class SamplingOptions(Options):
    """Default sampling parameters.

    Each option but `sampling_defaults` is the default of the request field of its name.
    """

    title: ClassVar[str] = "sampling"

    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="source of default sampling parameters: the model's "
        "generation_config.json, or OpenAI's",
    )
    temperature: Annotated[float, Field(**LIMITS["temperature"]), Flag("N")] | None = Field(
        None,
        description="how random tokens are: 0 takes the likeliest one, 1 samples as the model "
        f"predicts{_WITHOUT}",
    )
    top_p: Annotated[float, Field(**LIMITS["top_p"]), Flag("N")] | None = Field(
        None,
        description="sample from the likeliest tokens that together have this probability; 1 is off"
        f"{_WITHOUT}",
    )
    top_k: Annotated[int, Field(**LIMITS["top_k"]), Flag("N")] | None = Field(
        None,
        description=f"sample from this many of the likeliest tokens; 0 and -1 are off{_WITHOUT}",
    )
    min_p: Annotated[float, Field(**LIMITS["min_p"]), Flag("N")] | None = Field(
        None,
        description="drop tokens below this share of the likeliest token's probability; 0 is off"
        f"{_WITHOUT}",
    )
    repetition_penalty: (
        Annotated[float, Field(**LIMITS["repetition_penalty"]), Flag("N")] | None
    ) = Field(
        None,
        description="make tokens that have occurred less likely, by this factor of logits; 1 is "
        f"off{_WITHOUT}",
    )

    def sampling_overrides(self) -> dict[str, float]:
        """Return the operator's defaults, by the parameter's name."""
        named = SamplingOptions.model_fields.keys() - {"sampling_defaults"}
        return self.model_dump(include=set(named), exclude_none=True)


class ProcessorOptions(Options):
    """Options for the use of a CPU."""

    title: ClassVar[str] = "engine"

    kernels: Literal["auto", "native", "off", *CPU_KERNELS] = Field(  # type: ignore[valid-type]
        "auto",
        description="instruction set of the compiled CPU kernels; auto and native: the fastest "
        "that this processor has; off: no compiled kernels",
    )
    activation_bits: Annotated[Literal[8, 16], Whole] = Field(
        16,
        description="bits of activations that the CPU kernels multiply packed weights by; 8 is "
        "faster and less precise; llama.cpp has 8",
    )
    threads: Annotated[Count | None, Flag("N")] = Field(
        None,
        le=_MOST_THREADS,
        description="threads that compute on a CPU; default: one per core that this "
        "process may use, "
        "without efficiency cores",
    )

    def instructions(self) -> str:
        """Return `EngineConfig.kernels`."""
        return "auto" if self.kernels == "native" else self.kernels


class EngineOptions(ProcessorOptions):
    """Options of the engine."""

    title: ClassVar[str] = "engine"

    dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        None,
        description="type that the model computes in; default: the checkpoint's on a GPU (bfloat16 "
        "instead of float16 on CUDA), float32 on a CPU",
    )
    adapter: Annotated[Places, Flag("FOLDER | NAME=FOLDER", again=True)] = Field(
        (),
        description="a LoRA adapter as PEFT or mlx-lm saves it, or its hub id: one without a name "
        "is merged into the weights; those with names answer requests whose model they are; may be "
        "given again",
    )
    blas: Literal["auto", "openblas", "mlx"] = Field(
        _ENGINE.blas,
        description="library of matrix products on a CPU; auto: Quire's kernels if they are "
        "built (a row's bits are then independent of the batch), else OpenBLAS; "
        "mlx: MLX's own, slow",
    )
    tensor_parallel: CountOrAuto = Field(
        1,
        description="processes that the model is split over, by heads and by columns: one a card; "
        "auto is as many as there are cards, or hosts",
    )
    pipeline: Proportions | None = Field(
        None,
        description="split the model by layers over machines on slow links, in these proportions "
        "(3:1, a number for each process); auto is by the memory of the hosts",
    )
    hosts: Place | None = Field(
        None,
        description="a file of the machines that the model is split over, as mlx.launch reads it; "
        "the first is this one, the others are reached by ssh",
    )
    max_context: Count | None = Field(
        None, description="maximum tokens of prompt and answer together; default: the model's limit"
    )
    max_sequences: Count = Field(
        _ENGINE.max_sequences, description="sequences that run at once; others wait"
    )
    step_ms: Annotated[Seconds, Flag("MS")] = Field(
        _ENGINE.step_ms, description="target time of a step that only prefills"
    )
    batch_invariant: bool = Field(
        False,
        description="compute logits with the same bits alone and in any batch: on NVIDIA GPUs "
        "for text, in steps of 64 rows; the compiled CPU kernels give it anyway",
    )
    speculate: Annotated[str, AfterValidator(check_speculate), Flag("MODE")] = Field(
        _ENGINE.speculate,
        description="how tokens are guessed, of which a step verifies several; answers stay the "
        "same. ngram: by what followed the same tokens earlier; mtp: also by a head of the model; "
        "draft=MODEL: also by a smaller model with the same vocabulary; auto: ngram, and a head in "
        "the model's folder draft_head if there is one; off: not at all",
    )
    stop_on_loop: Annotated[int, AfterValidator(check_repeats), Flag("N")] | None = Field(
        None,
        description="end an answer that repeats a cycle of tokens N times, at least "
        f"{MIN_REPEATS}; 0: never; default: only answers bound by a schema or grammar, after 32 "
        "repeats and 512 tokens",
    )


class KVOptions(Options):
    """Options for storing the KV cache."""

    title: ClassVar[str] = "KV cache"

    kv_memory: Bytes | None = Field(
        None,
        description="memory budget of the KV cache, e.g. 8GB; default: a share of what is free",
    )
    kv_bits: Annotated[str | None, Flag("BITS")] = Field(
        None,
        description="quantise the KV cache to 8, 6, 5, 4, 3 or 2 bits, or keys and values "
        "separately as in 8/4",
    )
    kv_scheme: Annotated[str | None, Flag("SCHEME")] = Field(
        None,
        description="page (default with --kv-bits), uniform, turbo, plain, float32, float16 or "
        "bfloat16",
    )
    kv_group_size: Annotated[Literal[64, 32], Whole] = Field(
        64, description="elements per scale in the uniform scheme"
    )
    kv_skip_layers: Annotated[Numbers | None, Flag("LAYERS")] = Field(
        None,
        description="layers whose KV cache is not quantised, e.g. 5,11, or none; default: the last "
        "full-attention layer",
    )
    no_prefix_cache: bool = Field(
        False, description="disable prefix reuse: compute every prompt from its start"
    )
    kv_disk: Annotated[Place | None, Flag("DIR")] = Field(
        None,
        description="folder for evicted KV blocks, with one folder per model if there are "
        "several; they survive a restart",
    )
    kv_disk_size: Bytes = Field(20 * 10**9, description="disk space of each model's blocks there")

    def kv_format(self) -> KVFormat:
        """Return the format chosen by `--kv-bits` and `--kv-scheme`.

        Raises:
            QuireError: no such format is offered.
        """
        names = [each.name for each in offered(_ENGINE.block_size, self.kv_group_size)]
        try:
            return choose_format(names, self.kv_bits, self.kv_scheme) or KVFormat()
        except RequestError as error:
            text = error.message.replace("'kv_bits'", "--kv-bits")
            raise QuireError(text.replace("'kv_scheme'", "--kv-scheme")) from error


class ModelOptions(SamplingOptions, EngineOptions, KVOptions):
    """All options that a `[[models]]` table may set for its model."""

    title: ClassVar[str] = "each model"

    also_named: Names = Field(
        (),
        description="another name of the model, e.g. one that an agent expects; may be given again",
    )
    dialect: Annotated[str | None, Flag("DIALECT")] = Field(
        None,
        description="how answers write reasoning and tool calls, or none; default: by model",
    )
    system: Annotated[str, Flag("TEXT")] = Field(
        "", description="system message of conversations without one"
    )
    max_tokens: Count | None = Field(
        None, le=MOST_TOKENS, description="max_tokens of requests that do not set it"
    )
    idle_unload: Seconds | None = Field(
        None, description="unload the model after this time without a request; default: never"
    )
    keep_volatile: bool = Field(
        False,
        description="keep the parts of agents' prompts that change with every request",
    )
    allow_special_tokens: bool = Field(
        False,
        description="parse control tokens in messages, such as <|im_end|>, as tokens "
        "instead of text",
    )

    def merged_adapter(self) -> str | None:
        """Return the adapter that is merged into the weights.

        Raises:
            QuireError: there are two.
        """
        merged = [given for given in self.adapter if _name_of(given) is None]
        if len(merged) > 1:
            raise QuireError(
                "--adapter: only one adapter can be merged into the weights; give the others "
                "names (NAME=FOLDER)"
            )
        return merged[0] if merged else None

    def named_adapters(self) -> tuple[tuple[str, str], ...]:
        """Return (name, folder or hub id) of the adapters that requests may name.

        Raises:
            QuireError: a name is empty.
        """
        named = tuple(
            (name, given.partition("=")[2])
            for given in self.adapter
            if (name := _name_of(given)) is not None
        )
        if not all(map(all, named)):
            raise QuireError("--adapter: write it as NAME=FOLDER")
        return named

    def _ranks(self, hosts: Hosts | None) -> int:
        asked = self.tensor_parallel
        if self.pipeline is not None:
            return self._stages(self.pipeline, hosts)
        if hosts is None:
            return max(1, count_cards()) if asked == "auto" else asked
        if asked not in ("auto", 1, len(hosts.hosts)):
            raise QuireError(
                f"--tensor-parallel {asked}: the hosts file has {len(hosts.hosts)} hosts; "
                "list a machine with several GPUs once for each GPU"
            )
        return len(hosts.hosts)

    def _stages(self, weights: tuple[int, ...], hosts: Hosts | None) -> int:
        """Return the number of processes that a model is split over by layers."""
        if self.tensor_parallel != 1:
            raise QuireError("--pipeline splits by layers, --tensor-parallel each layer: say one")
        if not weights and hosts is None:
            raise QuireError("--pipeline auto: say --hosts, or proportions such as --pipeline 1:1")
        if weights and hosts is not None and len(weights) != len(hosts.hosts):
            count = len(hosts.hosts)
            raise QuireError(f"--pipeline has {len(weights)} numbers, the hosts file {count} hosts")
        return len(weights) if hosts is None else len(hosts.hosts)

    def engine_config(self, model: str) -> EngineConfig:
        """Return the engine's settings for a model.

        Args:
            model: a folder or a hub id.

        Raises:
            QuireError: no such KV format is offered, no model has the draft model's name, or the
                hosts file is wrong.
        """
        speculate, draft_model = speculation_of(self.speculate)
        hosts = None if self.hosts is None else read_hosts(Path(self.hosts))
        return EngineConfig(
            model=model,
            dtype=self.dtype or "",
            adapter=self.merged_adapter(),
            adapters=self.named_adapters(),
            blas=self.blas,
            kernels=self.instructions(),
            activation_bits=self.activation_bits,
            threads=self.threads or 0,
            kv_memory=self.kv_memory,
            kv_format=self.kv_format(),
            kv_skip_layers=self.kv_skip_layers,
            ranks=self._ranks(hosts),
            hosts=hosts,
            pipeline=self.pipeline,
            max_sequences=self.max_sequences,
            max_context=self.max_context,
            step_ms=self.step_ms,
            prefix_cache=not self.no_prefix_cache,
            disk=DiskConfig(self.kv_disk, self.kv_disk_size) if self.kv_disk else None,
            batch_invariant=self.batch_invariant,
            stop_on_loop=self.stop_on_loop,
            speculate=speculate,
            draft_model=None if draft_model is None else resolve(draft_model),
        )


def _name_of(adapter: str) -> str | None:
    """Return the name by which requests choose an adapter; None for a merged one."""
    name, equals, _ = adapter.partition("=")
    return name if equals and not Path(adapter).exists() else None

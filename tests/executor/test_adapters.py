"""Adapters of requests: several in one batch, against weights into which they are merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.request import FinishReason, Output, Request, SamplingParams
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.models.base import named_layers
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import solo_logits
from tests.support.families import CONFIGS
from tests.support.parity import executor_of
from tests.support.tiny_models import (
    gemma4_config,
    llama_config,
    qwen3_5_config,
    qwen3_moe_config,
    random_weights,
    write_model,
)

ATTENTION = ("q_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": (llama_config(), (*ATTENTION, *MLP)),
    "gemma4": (gemma4_config(), (*ATTENTION, *MLP)),
    "qwen3_moe": (qwen3_moe_config(), ATTENTION),
    "qwen3_5": (qwen3_5_config(), (*ATTENTION, "in_proj_qkv", "out_proj", *MLP)),
    "phi3": (CONFIGS["phi3"], ("qkv_proj", "gate_up_proj", "o_proj")),
}
PROMPTS = [[(7 * i * i + 3 * i + n) % 251 for i in range(20 + n)] for n in range(4)]


def checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, mx.array]:
    """Return a model of random weights, by the checkpoint's own names."""
    weights = random_weights(config)
    if config["model_type"] == "phi3":
        weights = fused(weights)
    write_model(folder, config)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return weights


def fused(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the checkpoint with queries, keys and values joined, and gate and up."""
    heads, gates = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    for (first, *others), whole in ((heads, "qkv_proj"), (gates, "gate_up_proj")):
        for name in [name for name in weights if f".{first}." in name]:
            names = [name.replace(first, each) for each in (first, *others)]
            rows = mx.concatenate([weights.pop(each) for each in names])
            weights[name.replace(first, whole)] = rows
    return weights


def adapter(
    folder: Path, weights: dict[str, mx.array], modules: Sequence[str], rank: int, seed: int
) -> str:
    """Return an adapter of all matrices with some last names, as PEFT saves it."""
    folder.mkdir()
    targets = {"target_modules": list(modules)}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.random.seed(seed)
    tensors: dict[str, mx.array] = {}
    for name, array in weights.items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in modules and array.ndim == 2:
            outputs, inputs = array.shape
            tensors[f"base_model.model.{path}.lora_A.weight"] = (
                mx.random.normal((rank, inputs)) / inputs**0.5
            )
            tensors[f"base_model.model.{path}.lora_B.weight"] = 0.5 * mx.random.normal(
                (outputs, rank)
            )
    assert tensors
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    return str(folder)


def engine_of(loaded: LoadedModel, folder: str, **adapters: str) -> tuple[Engine, dict[str, Any]]:
    """Return an engine, and the logits of each row that it draws from, by request and position."""
    seen: dict[str, Any] = {}

    def observe(rows: list[Any], logits: mx.array) -> None:
        for row, values in zip(rows, np.array(logits), strict=True):
            seen.setdefault(row.id, {})[row.position] = values

    config = EngineConfig(folder, adapters=tuple(adapters.items()), kv_memory=64 << 20)
    return assemble(loaded, config, observe), seen


def run(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {each.id: [] for each in requests}
    for each in requests:
        engine.add(each)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            answers[output.request_id] += output.token_ids
    return answers


def asked(name: str, prompt: int, adapter: str = "", count: int = 4, **more: Any) -> Request:
    return Request(
        name,
        tuple(PROMPTS[prompt]),
        SamplingParams(temperature=0),
        max_tokens=count,
        adapter=adapter,
        **more,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("gemma4", "qwen3_moe") else ())
        for name in FAMILIES
    ],
)
def test_rows_of_a_batch_have_their_own_adapters(name: str, tmp_path: Path) -> None:
    config, modules = FAMILIES[name]
    base = tmp_path / "base"
    weights = checkpoint(base, config)
    one = adapter(tmp_path / "one", weights, modules, rank=4, seed=1)
    two = adapter(tmp_path / "two", weights, modules[:1], rank=2, seed=2)
    loaded = open_model(str(base))
    engine, seen = engine_of(loaded, str(base), one=one, two=two)
    answers = run(
        engine, asked("plain", 0), asked("a", 0, "one"), asked("b", 0, "two"), asked("c", 1, "one")
    )
    reference = {"": loaded, "one": open_model(str(base), adapter=one)}
    reference["two"] = open_model(str(base), adapter=two)
    for request, prompt, used in (
        ("plain", 0, ""),
        ("a", 0, "one"),
        ("b", 0, "two"),
        ("c", 1, "one"),
    ):
        tokens = [*PROMPTS[prompt], *answers[request][:-1]]
        theirs = np.array(solo_logits(reference[used].model, tokens))
        scale = np.abs(theirs).max()
        for position, ours in seen[request].items():
            assert np.abs(ours - theirs[position - 1]).max() < 1e-4 * scale
    assert np.abs(seen["plain"][20] - seen["a"][20]).max() > 0.01
    engine.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("adapters")
    weights = checkpoint(folder / "base", llama_config())
    paths = [adapter(folder / f"a{n}", weights, ATTENTION, rank=2, seed=n) for n in range(2)]
    loaded = open_model(str(folder / "base"))
    engine, seen = engine_of(loaded, str(folder / "base"), a0=paths[0], a1=paths[1])
    yield engine, seen, loaded, paths
    engine.close()


def test_prefixes_are_shared_among_requests_of_one_adapter(served: Any) -> None:
    engine, seen, *_ = served
    long = tuple(range(1, 200))

    def cached(name: str, adapter: str) -> int:
        engine.add(Request(name, long, SamplingParams(temperature=0), 1, adapter=adapter))
        outputs: list[Output] = []
        while engine.has_work:
            outputs += engine.step()
        return outputs[-1].cached_tokens

    assert cached("first", "a0") == 0
    assert cached("other", "a1") == 0
    assert cached("none", "") == 0
    assert cached("again", "a0") >= 128
    assert np.array_equal(seen["first"][199], seen["again"][199]) or np.allclose(
        seen["first"][199], seen["again"][199], atol=1e-4
    )


def test_base_rows_keep_their_bits_beside_adapters(served: Any) -> None:
    engine, seen, *_ = served
    run(engine, asked("alone", 2))
    run(engine, asked("beside", 2, cache_salt="x"), asked("adapted", 3, "a1"))
    assert np.allclose(seen["alone"][22], seen["beside"][22], atol=1e-5)


def test_an_unknown_adapter_fails_its_request_alone(served: Any) -> None:
    engine, *_ = served
    engine.add(asked("wrong", 0, "nobody"))
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].finish is FinishReason.ERROR
    assert outputs[-1].error is not None
    assert "no adapter 'nobody'" in outputs[-1].error.message


def test_long_prompts_of_several_adapters_are_read_together(served: Any) -> None:
    engine, seen, loaded, paths = served
    prompts = {name: [(n * n + 5 * i) % 250 for n in range(90)] for i, name in enumerate("xyz")}
    used = {"x": "a0", "y": "", "z": "a1"}
    run(
        engine,
        *(
            Request(name, tuple(prompt), SamplingParams(temperature=0), 1, adapter=used[name])
            for name, prompt in prompts.items()
        ),
    )
    base = str(loaded.path)
    models = {
        "x": open_model(base, adapter=paths[0]),
        "y": loaded,
        "z": open_model(base, adapter=paths[1]),
    }
    for name, prompt in prompts.items():
        theirs = np.array(solo_logits(models[name].model, prompt))[-1]
        assert np.abs(seen[name][90] - theirs).max() < 1e-4 * np.abs(theirs).max()


def test_adapters_of_mlx_lm_and_packed_matrices(tmp_path: Path) -> None:
    config = llama_config()
    weights = checkpoint(tmp_path / "base", config)
    path = "model.layers.1.self_attn.o_proj"
    parts = mx.quantize(weights[f"{path}.weight"], group_size=32, bits=4)
    named = zip(("weight", "scales", "biases"), parts, strict=True)
    packed = weights | {f"{path}.{part}": array for part, array in named}
    mx.save_safetensors(str(tmp_path / "base" / "model.safetensors"), packed)
    folder = tmp_path / "adapter"
    folder.mkdir()
    lora = {"rank": 2, "scale": 3.0, "dropout": 0.0}
    settings = {"fine_tune_type": "lora", "lora_parameters": lora}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    outputs, inputs = weights[f"{path}.weight"].shape
    factors = {
        f"{path}.lora_a": mx.random.normal((inputs, 2)),
        f"{path}.lora_b": mx.random.normal((2, outputs)),
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), factors)
    loaded = open_model(str(tmp_path / "base"))
    engine, seen = engine_of(loaded, str(tmp_path / "base"), own=str(folder))
    run(engine, asked("own", 0, "own", count=1), asked("plain", 0, count=1))
    merged = open_model(str(tmp_path / "base"), adapter=str(folder))
    theirs = np.array(solo_logits(merged.model, PROMPTS[0]))[-1]
    assert np.abs(seen["own"][20] - theirs).max() < 1e-4 * np.abs(theirs).max()
    assert np.abs(seen["plain"][20] - theirs).max() > 0.01
    engine.close()


def test_adapters_come_and_go(served: Any) -> None:
    engine, seen, loaded, paths = served
    adapters = executor_of(engine).adapters
    adapters.add("late", loaded.read_adapter(paths[0]))
    run(engine, asked("before", 1, "a0"), asked("late", 1, "late"))
    assert np.allclose(seen["before"][21], seen["late"][21], atol=1e-5)
    adapters.remove("late")
    assert "late" not in adapters
    run(engine, asked("after", 1, "a1"))


def test_what_can_only_be_merged_is_refused(served: Any, tmp_path: Path) -> None:
    loaded = served[2]
    weights = {"lm_head.weight": mx.zeros((256, 64)), "model.embed_tokens.weight": mx.zeros((4, 4))}
    if "lm_head" in named_layers(loaded.model):
        path = adapter(tmp_path / "head", weights, ["lm_head"], rank=2, seed=1)
        with pytest.raises(ModelError, match="merge the adapter into the weights"):
            loaded.read_adapter(path)
    wrong = {"model.layers.0.self_attn.q_proj.weight": mx.zeros((8, 8))}
    path = adapter(tmp_path / "wrong", wrong, ["q_proj"], rank=2, seed=1)
    with pytest.raises(ModelError, match="the factors of"):
        loaded.read_adapter(path)
    unknown = {"model.layers.9.self_attn.q_proj.weight": mx.zeros((8, 8))}
    path = adapter(tmp_path / "unknown", unknown, ["q_proj"], rank=2, seed=1)
    with pytest.raises(ModelError, match="has no matrix"):
        loaded.read_adapter(path)

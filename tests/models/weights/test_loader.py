"""Opening folders, good and bad: each fault is named, and nothing is read before the checks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.cli.models import inspect
from quire.core.end_tokens import end_token_ids
from quire.core.errors import ModelError
from quire.device.device import CUDA, current_device
from quire.models.base import LanguageModel, named_parameters
from quire.models.weights.loader import open_model
from quire.models.weights.safetensors import find_shards
from tests.models.solo import solo_greedy, solo_logits
from tests.support.families import CONFIGS as FAMILY_CONFIGS
from tests.support.tiny_models import CONFIGS, llama_config, random_weights, tiny_model, write_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def _rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _weights(folder: Path) -> dict[str, mx.array]:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.eval(weights)
    return weights


def _save(folder: Path, weights: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def test_what_is_known_of_an_opened_model(tmp_path: Path) -> None:
    loaded = open_model(str(tiny_model(tmp_path, "llama")))

    assert loaded.path == tmp_path
    assert loaded.context_length == 1024
    assert loaded.dtype == "float32"
    assert loaded.parameter_bytes == sum(a.nbytes for a in random_weights(llama_config()).values())


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    whole = open_model(str(tiny_model(tmp_path / "whole", "qwen3")))
    folder = tiny_model(tmp_path / "shards", "qwen3")
    weights = _weights(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in part})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    sharded = open_model(str(folder))

    assert mx.array_equal(solo_logits(whole.model, PROMPT), solo_logits(sharded.model, PROMPT))
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors"):
        find_shards(folder)


def test_files_that_their_names_count_are_all_needed(tmp_path: Path) -> None:
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").touch()
    with pytest.raises(ModelError, match=r"2 of the 3 files 'model-N-of-00003\.safetensors'"):
        find_shards(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").touch()
    assert len(find_shards(tmp_path)) == 3


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3")
    config = folder / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert open_model(str(folder)).config["model_type"] == "qwen3"


def test_dtype_by_name(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "gemma4_ple")
    half = open_model(str(folder), dtype="bfloat16")
    full = open_model(str(folder))

    assert half.dtype == "bfloat16"
    assert half.parameter_bytes * 2 == full.parameter_bytes
    assert half.fingerprint != full.fingerprint
    logits = solo_logits(half.model, PROMPT)
    assert logits.dtype == mx.float32
    assert 0 < mx.max(mx.abs(logits - solo_logits(full.model, PROMPT))).item() < 0.2
    with pytest.raises(ModelError, match="int4"):
        open_model(str(folder), dtype="int4")


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        (mx.float16, "", "bfloat16"),
        (mx.float16, "float16", "float16"),
        (mx.float32, "", "float32"),
    ],
)
def test_a_device_may_store_another_type_than_the_checkpoint(
    own: mx.Dtype, asked: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_device(), "default_dtype", None)
    monkeypatch.setattr(current_device(), "replaced_dtypes", CUDA.replaced_dtypes)
    config = FAMILY_CONFIGS["llama"]
    weights = {name: each.astype(own) for name, each in random_weights(config).items()}
    folder = write_model(tmp_path, config, weights=weights)
    assert open_model(str(folder), dtype=asked).dtype == expected


def test_norms_without_weights_are_of_the_type_of_the_others(tmp_path: Path) -> None:
    config = FAMILY_CONFIGS["olmo"]
    weights = random_weights(config)
    published = {name: array for name, array in weights.items() if "norm" not in name}
    folder = write_model(tmp_path, config, weights=published)
    for dtype in ("bfloat16", "float16", "float32"):
        assert open_model(str(folder), dtype=dtype).dtype == dtype


def test_what_corrects_the_choice_of_experts_stays_wide(tmp_path: Path) -> None:
    folder = write_model(tmp_path, FAMILY_CONFIGS["glm4_moe"])
    places = named_parameters(open_model(str(folder), dtype="bfloat16").model)
    assert places["model.layers.1.mlp.e_score_correction_bias"].dtype == mx.float32
    assert places["model.layers.1.mlp.gate.weight"].dtype == mx.bfloat16


@pytest.mark.parametrize("name", CONFIGS)
def test_calls_leave_no_trace_on_the_model(name: str, tmp_path: Path) -> None:
    model = open_model(str(tiny_model(tmp_path, name))).model
    first = solo_greedy(model, PROMPT, 5)
    solo_greedy(model, [7] * 50, 2)
    assert solo_greedy(model, PROMPT, 5) == first


def test_room_is_checked_before_weights_are_read(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    needed = open_model(str(folder)).parameter_bytes
    asked: list[int] = []

    def refuse(model: LanguageModel, dtype: mx.Dtype, nbytes: int) -> None:
        asked.append(nbytes)
        raise ModelError("no room")

    with pytest.raises(ModelError, match="no room"):
        open_model(
            str(folder), check_room=refuse, on_progress=lambda *_: pytest.fail("weights were read")
        )
    assert asked == [needed]


def test_end_tokens_come_from_three_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path, llama_config(eos_token_id=[1, 2]))
    (folder / "generation_config.json").write_text('{"eos_token_id": [106, 50]}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    tokenizer = {"added_tokens": [{"id": 7, "content": "<end>"}, {"id": 8, "content": "<pad>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    assert open_model(str(folder)).eos_ids == {1, 2, 7, 50, 106}


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("tokenizer_config.json", "eos_token", ["<end>"]),
        ("tokenizer_config.json", "added_tokens_decoder", [1]),
        ("tokenizer_config.json", "added_tokens_decoder", {"x": {"content": "<end>"}}),
        ("tokenizer.json", "added_tokens", {"7": "<end>"}),
        ("tokenizer.json", "added_tokens", [{"content": "<end>"}]),
        ("tokenizer.json", "vocab", {"<end>": "x"}),
    ],
)
def test_a_tokenizer_without_ids_is_named(
    file: str, key: str, value: object, tmp_path: Path
) -> None:
    contents: dict[str, dict[str, Any]] = {"tokenizer_config.json": {"eos_token": "<end>"}}
    contents.setdefault(file, {})[key] = value
    if key == "vocab":
        contents[file] = {"model": {key: value}}
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"{re.escape(file)}: .*{key}"):
        end_token_ids(tmp_path)


@pytest.mark.parametrize("value", [True, [2, False], "2", 2.5, {"id": 2}])
def test_an_end_that_is_no_id_is_named(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id = .* is neither a number"):
        end_token_ids(tmp_path)


def test_fingerprint_tells_weights_and_configs_apart(tmp_path: Path) -> None:
    same = [open_model(str(tiny_model(tmp_path / n, "llama"))).fingerprint for n in "ab"]
    assert same[0] == same[1]
    other = open_model(str(tiny_model(tmp_path / "c", "llama", seed=1))).fingerprint
    _rewrite(tmp_path / "a", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    changed = open_model(str(tmp_path / "a")).fingerprint
    assert len({same[0], other, changed}) == 3


def test_unknown_model_type_is_named(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    _rewrite(folder, model_type="nonesuch")
    with pytest.raises(ModelError, match="nonesuch"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("llama", {"hidden_act": "relu6"}, "relu6"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("qwen3_moe", {"num_experts": None}, "num_experts"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma4_moe", {"top_k_experts": None}, "top_k_experts"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ("gemma4_ple", {"num_kv_shared_layers": 5}, "full_attention"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("qwen3", {"num_local_experts": 8}, "num_local_experts"),
        ("llama", {"hidden_size": "64"}, "hidden_size"),
        ("llama", {"rms_norm_eps": [1e-5]}, "rms_norm_eps"),
        ("llama", {"head_dim": None, "num_attention_heads": "4"}, r"config\.json"),
        ("qwen3", {"layer_types": 3}, "layer_types"),
        ("gemma4", {"rope_parameters": 3}, r"config\.json"),
        ("llama", {"quantization": "4bit"}, "quantization = '4bit'"),
        ("llama", {"quantization": {"bits": "4"}}, r"quantization\.bits = '4'"),
        ("llama", {"quantization_config": ["fp8"]}, r"quantization_config = \['fp8'\]"),
    ],
)
def test_settings_that_are_not_known_are_named(
    name: str, changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    folder = tiny_model(tmp_path, name)
    _rewrite(folder, **changes)
    with pytest.raises(ModelError, match=word):
        open_model(str(folder))
    assert re.search(word, inspect(folder, "it", "folder").problem or "")


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "gemma4_moe")
    weights = _weights(folder)
    name = "model.layers.2.router.scale"

    _save(folder, {key: array for key, array in weights.items() if key != name})
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        open_model(str(folder))
    _save(folder, weights | {"model.layers.2.surprise": mx.ones(3)})
    with pytest.raises(ModelError, match=r"layers\.2\.surprise"):
        open_model(str(folder))
    _save(folder, weights | {name: mx.ones(3)})
    with pytest.raises(ModelError, match=rf"{name}.*\[3\].*\[64\]"):
        open_model(str(folder))


def test_media_towers_and_unused_projections_are_left_out(tmp_path: Path) -> None:
    text = open_model(str(tiny_model(tmp_path / "text", "gemma4_ple")))
    nested = {"model_type": "gemma4", "text_config": CONFIGS["gemma4_ple"](), "eos_token_id": 9}
    folder = write_model(tmp_path / "nested", nested)
    weights = _weights(folder)
    for extra in ("vision_tower.a", "embed_vision.b", "audio_tower.c", "embed_audio.d"):
        weights |= {f"model.{extra}.weight": mx.ones(2), f"{extra}.bias": mx.ones(2)}
    for part in ("k_proj", "v_proj", "k_norm"):  # layer 5 reads the cache of layer 2
        weights[f"model.layers.5.self_attn.{part}.weight"] = mx.ones(2)
    weights = {
        name.replace("model.", "model.language_model.") if ".layers." in name else name: array
        for name, array in weights.items()
    }
    _save(folder, weights)

    multimodal = open_model(str(folder))

    assert multimodal.eos_ids == {1, 9}
    assert mx.array_equal(solo_logits(text.model, PROMPT), solo_logits(multimodal.model, PROMPT))


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    folder = write_model(tmp_path, FAMILY_CONFIGS["deepseek_v3"])
    first = solo_logits(open_model(str(folder)).model, PROMPT)
    _rewrite(folder, model_type="kimi_k2")
    assert mx.array_equal(first, solo_logits(open_model(str(folder)).model, PROMPT))


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    _rewrite(folder, rope_scaling=yarn)
    assert open_model(str(folder)).context_length == 2048


@pytest.mark.parametrize(
    ("outer", "text"),
    [
        ("gemma3", "gemma3_text"),
        ("llama4", "llama4_text"),
        ("mistral3", "ministral3"),
        ("mistral3", "mistral"),
    ],
)
def test_the_text_of_multimodal_checkpoints_is_read(outer: str, text: str, tmp_path: Path) -> None:
    config = FAMILY_CONFIGS[text]
    alone = open_model(str(write_model(tmp_path / "text", config)))
    nested = {"model_type": outer, "text_config": config}
    nested["tie_word_embeddings"] = config.get("tie_word_embeddings", text == "gemma3_text")
    folder = write_model(tmp_path / "nested", nested)
    weights = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in _weights(folder).items()
    }
    tower = "vision_model" if outer == "llama4" else "vision_tower"
    for extra in (f"{tower}.a.weight", "multi_modal_projector.b"):
        weights |= {extra: mx.ones(2), f"model.{extra}": mx.ones(2)}
    _save(folder, weights)

    within = open_model(str(folder))

    assert mx.array_equal(solo_logits(alone.model, PROMPT), solo_logits(within.model, PROMPT))


def test_qwen3_5_reads_multimodal_checkpoints(tmp_path: Path) -> None:
    text = open_model(str(tiny_model(tmp_path / "text", "qwen3_5")))
    nested = {
        "model_type": "qwen3_5",
        "text_config": CONFIGS["qwen3_5"](),
        "tie_word_embeddings": True,
    }
    folder = write_model(tmp_path / "nested", nested)
    weights = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in _weights(folder).items()
    }
    for name, array in weights.items():  # as Hugging Face has them
        if name.endswith("conv1d.weight"):
            weights[name] = array.swapaxes(-1, -2)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            weights[name] = array - 1.0
    weights |= {"model.visual.blocks.0.norm1.weight": mx.ones(2), "mtp.fc.weight": mx.ones((2, 2))}
    _save(folder, weights | {"lm_head.weight": weights["model.language_model.embed_tokens.weight"]})

    multimodal = open_model(str(folder))

    difference = solo_logits(text.model, PROMPT) - solo_logits(multimodal.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-5


def test_a_head_of_its_own_is_read_where_the_configuration_ties_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformers reads such a checkpoint so, too."""
    folder = write_model(tmp_path, llama_config(tie_word_embeddings=False))
    expected = solo_logits(open_model(str(folder)).model, PROMPT)
    _rewrite(folder, tie_word_embeddings=True)

    read = solo_logits(open_model(str(folder)).model, PROMPT)

    assert mx.array_equal(read, expected)
    assert "ties the head" in caplog.text


def test_a_model_that_embeds_needs_no_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen3-Embedding-8B unties the head, and has none."""
    config = CONFIGS["qwen3"](tie_word_embeddings=False)
    folder = write_model(tmp_path, config)
    weights = _weights(folder)
    del weights["lm_head.weight"]
    _save(folder, {name.removeprefix("model."): array for name, array in weights.items()})
    opened = open_model(str(folder)).model
    assert "no lm_head.weight" in caplog.text
    tied = write_model(tmp_path / "tied", config | {"tie_word_embeddings": True}, weights=weights)
    assert mx.array_equal(
        solo_logits(opened, PROMPT), solo_logits(open_model(str(tied)).model, PROMPT)
    )


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "cut", "llama")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for broken in (content[:-1], content[:100], b"", b"\xff" * 64):
        file.write_bytes(broken)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            open_model(str(folder))
    file.unlink()
    with pytest.raises(ModelError, match="safetensors"):
        open_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ([], "not a map"),
        (3, "not a map"),
        ({"a": 3}, "'a'"),
        ({"a": {}}, "'a'"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "'a'"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}, "'a'"),
        ({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "'a'"),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "'a'"),
    ],
)
def test_a_damaged_header_is_named(header: object, said: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    content = json.dumps(header).encode()
    data = len(content).to_bytes(8, "little") + content + bytes(4)
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{said}"):
        open_model(str(folder))
    assert inspect(folder, "it", "folder").problem is not None


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    file = folder / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n" * 3)
    with pytest.raises(ModelError, match=r"model\.safetensors is a Git LFS pointer"):
        open_model(str(folder))
    file.unlink()
    file.symlink_to(tmp_path / "blob")
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read: No such file"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", '{"a":' * 100_000),
        ("config.json", "version https://git-lfs.github.com/spec/v1"),
        ("config.json", '{"vocab_size": ' + "9" * 5000 + "}"),
        ("model.safetensors.index.json", "{"),
        ("model.safetensors.index.json", "{}"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
        ("generation_config.json", "nonsense"),
        ("generation_config.json", '{"eos_token_id": "</s>"}'),
        ("tokenizer_config.json", "\udcff"),
    ],
)
def test_damaged_json_is_named(name: str, content: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=re.escape(name)):
        open_model(str(folder))


def test_other_safetensors_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model(tmp_path, "llama")
    for other in ("consolidated.safetensors", "adapter_model.safetensors"):
        mx.save_safetensors(str(folder / other), {"layers.0.wq.weight": mx.ones((2, 2))})

    open_model(str(folder))

    assert "consolidated.safetensors" in caplog.text
    assert "adapter_model.safetensors" in caplog.text
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert [shard.name for shard in find_shards(folder)] == ["model-00001-of-00001.safetensors"]


@pytest.mark.parametrize("name", CONFIGS)
def test_names_of_mlx_vlm_conversions_are_known(name: str, tmp_path: Path) -> None:
    plain = open_model(str(tiny_model(tmp_path / "plain", name)))
    folder = tiny_model(tmp_path / "wrapped", name)
    weights = _weights(folder)
    _save(folder, {f"language_model.{key}": array for key, array in weights.items()})

    wrapped = open_model(str(folder))

    assert mx.array_equal(solo_logits(plain.model, PROMPT), solo_logits(wrapped.model, PROMPT))


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int8, mx.int32])
def test_integers_where_a_float_belongs_are_refused(dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    weights = _weights(folder)
    _save(folder, weights | {name: weights[name].astype(dtype)})
    with pytest.raises(ModelError, match=f"{name}' holds u?int"):
        open_model(str(folder))


def test_neither_folder_nor_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        open_model(str(tmp_path / "not" / "there"))

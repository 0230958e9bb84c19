"""The shipped folder: its size, its files, and what they say about each other."""

import json
import struct
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.demo import MODEL_DIR

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "README.md",
    "draft_head",
}


def read(name: str) -> Any:
    return json.loads((MODEL_DIR / name).read_text())


def tensors() -> dict[str, Any]:
    with (MODEL_DIR / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__")
    return header


def test_holds_its_files_and_no_more_than_20_megabytes() -> None:
    assert {path.name for path in MODEL_DIR.iterdir()} == FILES
    assert sum(path.stat().st_size for path in MODEL_DIR.rglob("*")) <= 20_000_000


def test_weights_are_bfloat16_under_the_names_of_gemma4() -> None:
    header = tensors()
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    parts = {".".join(name.split(".")[:2]) for name in header}
    towers = {f"model.{kind}_tower" for kind in ("vision", "audio")}
    assert parts == {"model.language_model", "model.embed_vision", "model.embed_audio"} | towers
    text = read("config.json")["text_config"]
    table = header["model.language_model.embed_tokens.weight"]["shape"]
    assert table == [text["vocab_size"], text["hidden_size"]]


def test_full_layers_have_no_value_projection_and_shared_layers_no_keys() -> None:
    header, text = tensors(), read("config.json")["text_config"]
    first_shared = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    for index, kind in enumerate(text["layer_types"]):
        prefix = f"model.language_model.layers.{index}.self_attn"
        assert (f"{prefix}.k_proj.weight" in header) == (index < first_shared)
        own_values = index < first_shared and kind == "sliding_attention"
        assert (f"{prefix}.v_proj.weight" in header) == own_values


def test_generation_stops_at_the_three_end_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    ends = [tokenizer.token_to_id(token) for token in ("<eos>", "<turn|>", "<|tool_response>")]
    assert read("generation_config.json")["eos_token_id"] == ends
    assert read("config.json")["eos_token_id"] == ends


@pytest.mark.parametrize(
    ("field", "token"),
    [
        ("boi_token_id", "<|image>"),
        ("image_token_id", "<|image|>"),
        ("eoi_token_id", "<image|>"),
        ("audio_token_id", "<|audio|>"),
        ("video_token_id", "<|video|>"),
    ],
)
def test_the_configuration_names_the_media_tokens(field: str, token: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    assert read("config.json")[field] == tokenizer.token_to_id(token)

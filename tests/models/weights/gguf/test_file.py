"""Headers of GGUF files, their parts, and what is refused."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type

from quire.core.errors import ModelError
from quire.models.weights.gguf import codes
from quire.models.weights.gguf.file import read_gguf
from quire.models.weights.hub import find_folder
from quire.models.weights.loader import open_model
from tests.models.solo import solo_logits
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import llama_config, random_weights

PROMPT = [(11 * i + 5) % 256 for i in range(40)]
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model whose down projections are wide enough for blocks of 256."""
    config = llama_config(rope_parameters=PLAIN, intermediate_size=256)
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), random_weights(config))
    return folder


def test_a_header_is_what_the_package_reads(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    more = {"list": [1.5, 2.5], "flags": [True, False], "words": ["a", "ü"], "small": -3.0}
    write_gguf(folder, file, kinds=lambda name: Type.Q8_0, more=more)

    ours, theirs = read_gguf(file), gguf.GGUFReader(file)

    fields = {name: field for name, field in theirs.fields.items() if "GGUF." not in name}
    assert ours.metadata.keys() == fields.keys()
    for name, field in fields.items():
        assert ours.metadata[name] == pytest.approx(field.contents())
    assert ours.get("attention.layer_norm_rms_epsilon") == 1e-5
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (info.kind, info.start) == (tensor.tensor_type, tensor.data_offset)
        assert info.nbytes == tensor.n_bytes


def test_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"other\.gguf: .*'clip'.*an encoder of images"):
        find_folder(str(tmp_path / "other.gguf"))
    (tmp_path / "other.gguf").rename(tmp_path / "mmproj-F16.gguf")
    for given in (tmp_path / "mmproj-F16.gguf", tmp_path):
        with pytest.raises(ModelError, match=r"mmproj-F16\.gguf.*name the model's own file"):
            find_folder(str(given))


def test_a_file_a_folder_and_parts_are_one_model(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, parts = tmp_path / "whole" / "model.gguf", tmp_path / "parts"
    whole.parent.mkdir()
    parts.mkdir()
    write_gguf(folder, whole)
    _split(whole, parts)
    (parts / "mmproj-model.gguf").write_bytes(b"GGUF: an encoder of images")

    expected = solo_logits(open_model(str(folder)).model, PROMPT)
    opened = [
        open_model(str(path))
        for path in (whole, whole.parent, parts, parts / "model-00002-of-00003.gguf")
    ]

    for loaded in opened:
        assert mx.max(mx.abs(solo_logits(loaded.model, PROMPT) - expected)).item() < 1e-4
    assert "the model serves text only: mmproj-model.gguf" in caplog.text
    assert opened[0].fingerprint == opened[1].fingerprint != opened[2].fingerprint
    (parts / "model-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"part 'model-00003-of-00003\.gguf' is missing"):
        open_model(str(parts))


def _split(whole: Path, folder: Path) -> None:
    """Split a file as `gguf-split` does: metadata in the first part, tensors in all."""
    reader = gguf.GGUFReader(whole)
    third = -(-len(reader.tensors) // 3)
    for part in range(3):
        path = folder / f"model-{part + 1:05}-of-00003.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        for name, field in reader.fields.items() if part == 0 else ():
            if "GGUF." not in name and name != "general.architecture":
                sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], sub)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 3)
        for tensor in reader.tensors[part * third : (part + 1) * third]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.mark.parametrize("size", [3, 20, 200, 3000, -1])
def test_a_file_cut_short_is_refused(size: int, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(folder, file)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.gguf: .*(cut short|the file at|not a GGUF)"):
        find_folder(str(file))


def test_what_is_not_served_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(folder, file)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"llama", b"bloom"))
    with pytest.raises(
        ModelError, match=r"GGUF architecture 'bloom' is not supported \(known: afmoe, apertus"
    ):
        find_folder(str(file))
    file.write_bytes(content.replace(b"llama.context_length", b"llama.cantext_length"))
    with pytest.raises(ModelError, match=r"no 'llama\.context_length'"):
        find_folder(str(file))
    file.write_bytes(content.replace(b"GGUF\x03", b"GGUF\x01"))
    with pytest.raises(ModelError, match="GGUF version 1"):
        find_folder(str(file))
    write_gguf(folder, file, tensors={"blk.0.attn_rot.weight": np.zeros((4, 32), np.float32)})
    with pytest.raises(ModelError, match=r"tensor 'blk\.0\.attn_rot\.weight'"):
        open_model(str(file))


def _with(content: bytes, key: str, kind: int, value: bytes) -> bytes:
    """Return a GGUF file's bytes with one more key before the others; its tensors stay aligned."""
    version, tensors, keys = struct.unpack_from("<IQQ", content, 4)
    entry = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value
    name = "pad"
    gap = -(len(entry) + 8 + len(name) + 4 + 8) % 32
    entry += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IQ", 8, gap) + b" " * gap
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys + 2) + entry + content[24:]


_TWO = struct.pack("<IQii", 5, 2, 1, 2)
_NOTHING = struct.pack("<IQ", 5, 0)


@pytest.mark.parametrize(
    ("key", "kind", "value", "named"),
    [
        ("llama.block_count", 8, struct.pack("<Q", 1) + b"x", "'x' is not an integer from 1"),
        ("llama.block_count", 10, struct.pack("<Q", 2**31 - 1), "= 2147483647 for .* tensors"),
        ("llama.block_count", 6, struct.pack("<f", float("nan")), "nan is not an integer"),
        ("llama.embedding_length", 9, _TWO, r"= \[1, 2\] is not an integer"),
        ("llama.attention.head_count", 9, _NOTHING, r"= \[\] is not an integer"),
        ("llama.feed_forward_length", 9, _NOTHING, r"= \[\] is not an integer"),
        ("llama.rope.dimension_count", 9, _TWO, r"= \[1, 2\] is not an integer"),
        ("llama.rope.freq_base", 7, b"\1", "True is not a finite number"),
        ("general.alignment", 4, bytes(4), "= 0 is not an integer from 1"),
        ("tokenizer.ggml.model", 9, _TWO, "is not a string"),
        ("tokenizer.ggml.pre", 9, _TWO, "is not a string"),
        ("tokenizer.ggml.tokens", 4, bytes(4), "= 0 is not a list of strings"),
        ("tokenizer.ggml.token_type", 4, bytes(4), "= 0 is not a list of integers"),
        ("tokenizer.ggml.scores", 4, bytes(4), "= 0 is not a list of finite numbers"),
        ("tokenizer.ggml.merges", 9, _TWO, "is not a list of strings"),
        ("tokenizer.ggml.merges", 9, struct.pack("<IQQ", 8, 1, 1) + b"a", r"\[0\] = 'a' is not"),
        ("tokenizer.ggml.eos_token_id", 9, _TWO, r"= \[1, 2\] is not an integer"),
        ("tokenizer.chat_template", 9, _TWO, "is not a string"),
        ("deep", 9, struct.pack("<IQ", 9, 1) * 20000, "damaged GGUF header"),
    ],
)
def test_keys_of_another_type_are_refused_by_name(
    key: str, kind: int, value: bytes, named: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(folder, file)
    # A key that comes again counts as it stands last: the file's own has another name.
    own = key.encode()
    content = file.read_bytes().replace(own, b"_" * len(own))
    file.write_bytes(_with(content, key, kind, value))
    where = "" if key == "deep" else rf".*{re.escape(key)}.*"
    with pytest.raises(ModelError, match=rf"model\.gguf: {where}{named}"):
        find_folder(str(file))


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("blk.0.attn_v.weight", (), r"cannot have shape \(\)"),
        ("blk.0.attn_v.weight", (0, 64), r"cannot have shape \(0, 64\)"),
        ("blk.0.attn_v.weight", (2**62, 4), "cannot have shape"),
        ("blk.0.attn_k.weight", (31, 64), r"has shape \(31, 64\), which does not fit"),
        ("token_embd.weight", None, "no tensor"),
    ],
)
def test_shapes_that_cannot_be_are_refused_by_tensor(
    name: str, shape: tuple[int, ...] | None, named: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(folder, file)
    content, coded = file.read_bytes(), struct.pack("<Q", len(name)) + name.encode()
    at = content.index(coded) + len(coded)
    (axes,) = struct.unpack_from("<I", content, at)
    if shape is None:
        changed = content.replace(name.encode(), name[:-1].encode() + b"_")
    else:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        rest = content[at + 4 + 8 * axes :]
        # Where the header gets shorter, its last key's bytes are filled up before the tensors.
        first = gguf.GGUFReader(file).data_offset
        gap = b"\0" * (8 * (axes - len(shape)))
        end = first - (at + 4 + 8 * axes)
        changed = content[:at] + sizes + rest[:end] + gap + rest[end:]
    file.write_bytes(changed)
    with pytest.raises(ModelError, match=rf"{re.escape(name)}.*{named}|{named} '{name}'"):
        open_model(str(file))


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.Q8_0])
def test_types_that_a_tensor_cannot_have_are_refused_by_name(
    kind: Type, folder: Path, tmp_path: Path
) -> None:
    """Rows of 64 numbers are no blocks of 256; a norm in blocks is no norm."""
    file = tmp_path / "model.gguf"
    write_gguf(folder, file)
    name = b"output_norm.weight"
    content = file.read_bytes()
    at = content.index(name) + len(name) + 4 + 8
    file.write_bytes(content[:at] + struct.pack("<I", kind) + content[at + 4 :])
    with pytest.raises(
        ModelError,
        match=r"(output_norm|model\.norm)\.weight' .*(shape|quantised, but only matrices)",
    ):
        open_model(str(file))


def test_several_models_in_a_folder_are_named(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(folder, tmp_path / f"{name}.gguf")
    with pytest.raises(ModelError, match=r"name one of a\.gguf, b\.gguf"):
        find_folder(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert find_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("kind", [*codes.REPACKED, Type.Q6_K, Type.Q3_K, Type.IQ4_XS, Type.TQ2_0])
def test_codes_stand_for_what_the_package_says(kind: Type) -> None:
    """Every number exactly, of random codes and scales, in a stack of matrices."""
    random = np.random.default_rng(kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (2, 3, 512 // numbers, size), dtype=np.uint8)
    scale = random.uniform(-1, 1, (2, 3, 512 // numbers, 2)).astype(np.float16).view(np.uint8)
    first = {Type.Q6_K: 208, Type.Q3_K: 108, Type.TQ2_0: 64}.get(kind, 0)
    if kind is Type.MXFP4:
        blocks[..., 0] = random.integers(118, 130, blocks.shape[:-1])
    else:
        width = min(4, size - first) if kind in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K) else 2
        blocks[..., first : first + width] = scale[..., :width]
    rows = blocks.reshape(2, 3, -1)

    parts = codes.decode(kind, mx.array(rows))

    if codes.is_repacked(kind):
        bits = parts["weight"].shape[-1] * 32 // 512
        mode = "affine" if "biases" in parts else "mxfp4"
        matrix = mx.dequantize(
            parts["weight"], parts["scales"], parts.get("biases"), 32, bits, mode
        )
    else:
        matrix = parts["weight"]
    expected = gguf.quants.dequantize(rows, kind)
    assert np.array_equal(np.array(matrix.astype(mx.float32)), expected)
    assert np.ptp(expected) > 0.1


def test_what_is_unpacked_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "blk.0.ffn_down.weight"
    stands_for = write_gguf(
        folder,
        tmp_path / "codes.gguf",
        kinds=lambda each: Type.TQ2_0 if each == name else Type.F32,
    )
    write_gguf(folder, tmp_path / "plain.gguf", tensors=stands_for)

    ours, theirs = (open_model(str(tmp_path / f"{each}.gguf")) for each in ("codes", "plain"))

    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4
    assert "1 of TQ2_0" in caplog.text

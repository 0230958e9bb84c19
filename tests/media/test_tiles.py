"""Pictures as tiles: pixels, sizes and words as transformers has them; settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import TOWER_COLOURS, MediaItem
from quire.media.kinds import KINDS
from quire.media.processors.base import MediaProcessor
from quire.media.processors.cohere import best_canvas
from quire.media.processors.llava import LlavaOnevisionVideoProcessor
from quire.media.video import Frame, VideoInfo
from tests.media.test_images import encoded, noise

SIGLIP = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "vision_config": SIGLIP,
    "mm_tokens_per_image": 4,
    "image_token_index": 7,
}
GEMMA3_SETTINGS: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_convert_rgb": None,
    "do_pan_and_scan": None,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 2,
    "size": {"height": 56, "width": 56},
}
SIZES = [(56, 56), (1, 1), (7, 3), (160, 112), (112, 500), (640, 480), (481, 1023)]


def processor(
    path: Path, config: dict[str, Any], settings: dict[str, Any], kind: str = "image"
) -> MediaProcessor:
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    found = KINDS[kind].open(path)
    assert found is not None
    return found


def pixels(item: MediaItem, config: dict[str, Any]) -> np.ndarray:
    """Return an item's tiles as transformers gives them, `[tiles, 3, seen, seen]`."""
    vision = config["vision_config"]
    size, patch = (np.max(vision[key]) for key in ("image_size", "patch_size"))
    side = size // patch
    raw = np.frombuffer(item.features, np.uint8).reshape(-1, side, side, patch, patch, 3)
    tiles = raw.swapaxes(2, 3).reshape(len(raw), side * patch, side * patch, 3)
    colours = TOWER_COLOURS[vision["model_type"]]
    scaled: np.ndarray = (tiles / 255 - np.array(colours.mean)) / colours.std
    return scaled.transpose(0, 3, 1, 2)


def test_gemma3_against_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    theirs = oracle.Gemma3ImageProcessorPil(**GEMMA3_SETTINGS)
    ours = processor(tmp_path, GEMMA3, GEMMA3_SETTINGS)
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        (part,) = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"]
        assert np.abs(pixels(part.item, GEMMA3) - wanted).max() < 1e-3
        assert (part.item.tokens, part.item.bidirectional) == (4, True)
        assert (part.before, part.after) == ("\n\n<start_of_image>", "<end_of_image>\n\n")


SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 20,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


@pytest.mark.parametrize(
    ("size", "crops"),
    [
        ((50, 50), 0),
        ((59, 50), 0),  # not long enough
        ((61, 50), 2),
        ((50, 61), 2),
        ((36, 30), 0),  # parts would be too small
        ((150, 50), 3),
        ((125, 50), 3),  # half is rounded up
        ((47, 151), 3),
        ((400, 30), 4),
    ],
)
def test_gemma3_scans_long_pictures_as_transformers_does(
    size: tuple[int, int], crops: int, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    theirs = oracle.Gemma3ImageProcessorPil(**GEMMA3_SETTINGS | SCAN)
    ours = processor(tmp_path, GEMMA3, GEMMA3_SETTINGS | SCAN)
    picture = noise(*size, 1)
    parts = ours.read(encoded(picture), param="p")
    found = theirs.preprocess(picture, return_tensors="np", **SCAN)
    assert found["num_crops"] == [crops]
    assert len(parts) == 1 + crops
    for part, wanted in zip(parts, found["pixel_values"], strict=True):
        assert np.abs(pixels(part.item, GEMMA3) - wanted[None]).max() < 1e-3
    mark = "\n\n<start_of_image><end_of_image>\n\n"
    expected = mark
    if crops:
        several = " ".join([mark] * crops)
        expected = f"Here is the original image {mark} and here are some crops to help you see "
        expected += f"better {several}"
    assert "".join(part.before + part.after for part in parts) == expected


def test_parts_of_a_picture_fit_its_limit(tmp_path: Path) -> None:
    ours = processor(tmp_path, GEMMA3, GEMMA3_SETTINGS | SCAN)
    picture = encoded(noise(150, 50))
    assert len(ours.read(picture, param="p", detail=16)) == 4
    assert len(ours.read(picture, param="p", detail=15)) == 1


def test_gemma3n_against_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.siglip.image_processing_pil_siglip")
    config = {"model_type": "gemma3n", "vision_config": {}, "vision_soft_tokens_per_image": 4}
    settings: dict[str, Any] = {
        "size": {"height": 64, "width": 64},
        "resample": 2,
        "do_normalize": False,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    theirs = oracle.SiglipImageProcessorPil(**settings)
    ours = processor(tmp_path, config, settings | {"image_processor_type": "SiglipImageProcessor"})
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        (part,) = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"][0]
        found = np.frombuffer(part.item.features, np.uint8).reshape(64, 64, 3) / 255
        assert np.abs(found.transpose(2, 0, 1) - wanted).max() < 1e-3
        assert (part.item.tokens, part.item.shape, part.item.bidirectional) == (4, (64, 64), False)
        assert (part.before, part.after) == ("\n\n<start_of_image>", "<end_of_image>\n\n")
    normalised = settings | {"image_processor_type": "SiglipImageProcessor", "do_normalize": True}
    with pytest.raises(ModelError, match="image_mean"):
        processor(tmp_path, config, normalised)


def test_a_picture_cannot_take_fewer_tokens_than_a_tile(tmp_path: Path) -> None:
    ours = processor(tmp_path, GEMMA3, GEMMA3_SETTINGS)
    with pytest.raises(RequestError, match="max_soft_tokens is 3"):
        ours.read(encoded(noise(9, 9)), param="p", detail=3)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"size": {"height": 56, "width": 28}}, "size"),
        ({"size": {"height": 28, "width": 28}}, "56 by 56"),
        ({"resample": 0}, "resample"),
        ({"image_mean": [0.4] * 3}, "image_mean"),
        ({"do_resize": None}, "do_resize"),
        ({"do_pan_and_scan": 2}, "do_pan_and_scan"),
        ({"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 0}, "pan_and_scan_max_num_crops"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        processor(tmp_path, GEMMA3, GEMMA3_SETTINGS | changes)


CLIP = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
LLAVA: dict[str, Any] = {"model_type": "llava", "vision_config": CLIP, "image_token_index": 7}
MEANS = {
    "image_mean": list(TOWER_COLOURS["clip_vision_model"].mean),
    "image_std": list(TOWER_COLOURS["clip_vision_model"].std),
}
CROPPED: dict[str, Any] = {
    "crop_size": {"height": 56, "width": 56},
    "size": {"shortest_edge": 56},
    "resample": 3,
    **MEANS,
}


@pytest.mark.parametrize("pad", [False, True])
def test_llava_against_transformers(tmp_path: Path, pad: bool) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.llava.image_processing_pil_llava")
    settings = CROPPED | {"do_pad": pad}
    theirs = oracle.LlavaImageProcessorPil(**settings)
    ours = processor(tmp_path, LLAVA, settings | {"image_processor_type": "LlavaImageProcessor"})
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        (part,) = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"]
        assert np.abs(pixels(part.item, LLAVA) - wanted).max() < 1e-3
        assert (part.item.tokens, part.item.bidirectional, part.before) == (16, False, "")


NEXT = LLAVA | {"model_type": "llava_next"}
PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
ONEVISION: dict[str, Any] = {
    "model_type": "llava_onevision",
    "vision_config": SIGLIP,
    "image_token_index": 7,
    "video_token_index": 8,
    "vision_aspect_ratio": "anyres_max_4",
}
ONEVISION_SETTINGS: dict[str, Any] = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"height": 56, "width": 56},
    "image_grid_pinpoints": [[56 * a, 56 * b] for a in range(1, 5) for b in range(1, 5)],
}


def rows_of(oracle: Any, theirs: Any, ratio: str | None, size: tuple[int, int]) -> int:
    """Return the rows of a picture of this height and width by transformers' processor."""
    counting = object.__new__(oracle)
    counting.image_processor = theirs
    counting.patch_size, counting.num_additional_image_tokens = 14, 0
    counting.num_image_tokens, counting.vision_aspect_ratio = 16, ratio
    rows: int = counting._get_number_of_features(*size, 56, 56)
    return rows


def test_a_null_turns_a_step_off_and_leaves_the_encoder_as_usual(tmp_path: Path) -> None:
    """A processor in transformers has defaults only for settings that are absent, not for null."""

    def read(vision: dict[str, Any], steps: dict[str, Any]) -> Any:
        settings = CROPPED | {"image_processor_type": "CLIPImageProcessor"} | steps
        one = processor(tmp_path, LLAVA | {"vision_config": CLIP | vision}, settings)
        return one.read(encoded(noise(90, 200)), param="p")

    usual, off = read({}, {}), read({}, {"do_center_crop": False})
    assert usual != off
    assert read({}, {"do_center_crop": None}) == off
    assert read({"model_type": None}, {}) == usual


def test_llava_next_against_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.llava_next.image_processing_pil_llava_next")
    words = pytest.importorskip("transformers.models.llava_next.processing_llava_next")
    settings = CROPPED | {"image_grid_pinpoints": PINPOINTS}
    theirs = oracle.LlavaNextImageProcessorPil(**settings)
    named = settings | {"image_processor_type": "LlavaNextImageProcessor"}
    ours = processor(tmp_path, NEXT, named)
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        (part,) = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"][0]
        assert np.abs(pixels(part.item, NEXT) - wanted).max() < 1e-3
        assert part.item.tokens == rows_of(words.LlavaNextProcessor, theirs, None, size[::-1])


def test_llava_onevision_against_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    module = "transformers.models.llava_onevision"
    oracle = pytest.importorskip(f"{module}.image_processing_pil_llava_onevision")
    words = pytest.importorskip(f"{module}.processing_llava_onevision").LlavaOnevisionProcessor
    theirs = oracle.LlavaOnevisionImageProcessorPil(**ONEVISION_SETTINGS)
    named = ONEVISION_SETTINGS | {"image_processor_type": "LlavaOnevisionImageProcessor"}
    ours = processor(tmp_path, ONEVISION, named)
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        (part,) = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"][0]
        assert np.abs(pixels(part.item, ONEVISION) - wanted).max() < 1e-3
        ratio = "anyres_max_4"
        assert part.item.tokens == rows_of(words, theirs, ratio, size[::-1])
        # One of several.
        (part,) = ours.read(encoded(picture), param="p", detail=ours.detail_of_several)
        several = theirs.preprocess([[picture, picture]], return_tensors="np")["pixel_values"]
        assert np.abs(pixels(part.item, ONEVISION) - several[0]).max() < 1e-3
        assert part.item.tokens == 17


def test_fewer_tokens_are_a_coarser_grid(tmp_path: Path) -> None:
    named = ONEVISION_SETTINGS | {"image_processor_type": "LlavaOnevisionImageProcessor"}
    ours = processor(tmp_path, ONEVISION, named)
    data = encoded(noise(500, 400))
    found = [ours.read(data, param="p", detail=each)[0].item.tokens for each in (17, 60, 1000)]
    assert found[0] == 17 < found[1] <= 60 < found[2]
    named = CROPPED | {
        "image_grid_pinpoints": PINPOINTS,
        "image_processor_type": "LlavaNextImageProcessor",
    }
    ours = processor(tmp_path, NEXT, named)
    low, high = (ours.read(data, param="p", detail=each)[0].item.tokens for each in ("low", "high"))
    assert low < high
    with pytest.raises(RequestError, match="max_soft_tokens is 20"):
        ours.read(data, param="p", detail=20)


@pytest.mark.parametrize("grids", [None, [], [[56]], [[56, 57]], [[56, 0]], "x"])
def test_grids_that_cannot_be_read_are_named(tmp_path: Path, grids: Any) -> None:
    settings = CROPPED | {
        "image_grid_pinpoints": grids,
        "image_processor_type": "LlavaNextImageProcessor",
    }
    with pytest.raises(ModelError, match="image_grid_pinpoints"):
        processor(tmp_path, NEXT, settings)


def test_videos_of_llava_onevision_are_read_beside_pictures(tmp_path: Path) -> None:
    named = ONEVISION_SETTINGS | {"image_processor_type": "LlavaOnevisionImageProcessor"}
    ours = processor(tmp_path, ONEVISION, named, "video")
    info = VideoInfo(frames=100, fps=10.0)
    assert len(ours.sample_frames(info, 256)) == 32
    assert list(ours.sample_frames(info, 4)) == [0, 25, 50, 75]
    frames = (Frame(number, noise(90, 50, number)) for number in range(3))
    (part,) = ours.preprocess(info, frames, 3, "p", "auto")
    assert (part.item.shape, part.item.tokens) == ((3,), 13)


@pytest.mark.parametrize("kind", ["LlavaOnevisionVideoProcessor", "LlavaOnevisionImageProcessor"])
def test_settings_for_videos_may_be_named_as_for_pictures(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ONEVISION))
    named = ONEVISION_SETTINGS | {"image_processor_type": kind}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(named))
    assert isinstance(KINDS["video"].open(tmp_path), LlavaOnevisionVideoProcessor)


DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_vl",
    "vision_config": SIGLIP,
    "image_token_id": 7,
}


def test_deepseek_against_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.deepseek_vl.image_processing_pil_deepseek_vl")
    settings = {"size": {"height": 56, "width": 56}, "min_size": 14}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    theirs = oracle.DeepseekVLImageProcessorPil(**settings)
    named = settings | {"image_processor_type": "DeepseekVLImageProcessor"}
    ours = processor(tmp_path, DEEPSEEK, named)
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        (part,) = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"]
        assert np.abs(pixels(part.item, DEEPSEEK) - wanted).max() < 1e-3
        assert part.item.tokens == 16


LLAMA = {"model_type": "llama"}
ORIGINAL: dict[str, Any] = {
    "model_type": "multi_modality",
    "vision_config": {"params": {"image_size": 56}, "patch_size": 14},
    "aligner_config": {"params": {"projector_type": "mlp_gelu"}},
    "language_config": LLAMA,
}
VLM: dict[str, Any] = {"image_processor_type": "VLMImageProcessor", "min_size": 14}


def with_token(folder: Path, text: str) -> None:
    """A folder whose tokenizer has a token of this text, 7."""
    listed = {"added_tokens_decoder": {"7": {"content": text}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(listed))


def test_pictures_of_deepseeks_own_code(tmp_path: Path) -> None:
    """Sides are cut, not rounded: 56 of 101 of 99 is 54.89."""
    with pytest.raises(ModelError, match="<image_placeholder>"):
        processor(tmp_path, ORIGINAL, VLM)
    with_token(tmp_path, "<image_placeholder>")
    picture = noise(101, 99)
    for config, words in ((ORIGINAL, ("", "")), (ORIGINAL | {"gen_vision_config": {}}, MARKS)):
        ours = processor(tmp_path, config, VLM | {"image_mean": [0.5] * 3})
        (part,) = ours.read(encoded(picture), param="p")
        assert ((part.before, part.after), part.item.tokens) == (words, 16)
        assert ours.placeholders.token == 7
        square = PIL.Image.new("RGB", (56, 56), (127,) * 3)
        square.paste(picture.resize((56, 54), PIL.Image.Resampling.BICUBIC), (0, 1))
        grid = np.frombuffer(part.item.features, np.uint8).reshape(4, 4, 14, 14, 3)
        assert np.array_equal(grid.swapaxes(1, 2).reshape(56, 56, 3), np.asarray(square))


MARKS = ("<begin_of_image>", "<end_of_image>")


def test_pictures_of_deepseeks_own_code_twice(tmp_path: Path) -> None:
    with_token(tmp_path, "<image_placeholder>")
    low, high = {"image_size": 56}, {"image_size": 112, "patch_size": 28}
    config = ORIGINAL | {
        "vision_config": {"params": {"low_res_cfg": low, "high_res_cfg": high}, "patch_size": 14},
        "aligner_config": {"params": {"projector_type": "low_high_hybrid_split_mlp_gelu"}},
    }
    settings = VLM | {"do_normalize": False, "image_size": 112}
    ours = processor(tmp_path, config, settings | {"image_mean": MEANS["image_mean"]})
    (part,) = ours.read(encoded(noise(112, 70)), param="p")
    assert (part.item.shape, part.item.tokens) == ((1,), 16)
    large = PIL.Image.new("RGB", (112, 112), (122, 116, 104))
    large.paste(noise(112, 70), (0, 21))
    small = large.resize((56, 56), PIL.Image.Resampling.BILINEAR)
    found = np.frombuffer(part.item.features, np.uint8)
    first, second = found[: 3 * 112**2].reshape(4, 4, 28, 28, 3), found[3 * 112**2 :]
    second = second.reshape(4, 4, 14, 14, 3)
    for grid, wanted in ((first, large), (second, small)):
        assert np.array_equal(grid.swapaxes(1, 2).reshape(np.asarray(wanted).shape), wanted)
    with pytest.raises(ModelError, match="do_normalize"):
        processor(tmp_path, config, settings | {"do_normalize": True})


INTERNVL: dict[str, Any] = {
    "model_type": "internvl",
    "vision_config": {
        "model_type": "internvl_vision",
        "image_size": [56, 56],
        "patch_size": [14, 14],
    },
    "image_token_id": 7,
    "downsample_ratio": 0.5,
}
INTERNVL_SETTINGS: dict[str, Any] = {
    "image_mean": list(TOWER_COLOURS["internvl_vision"].mean),
    "image_std": list(TOWER_COLOURS["internvl_vision"].std),
    "size": {"height": 56, "width": 56},
    "max_patches": 12,
    "min_patches": 1,
}
AYA = {"model_type": "aya_vision", "vision_config": SIGLIP, "image_token_index": 7}
AYA_SETTINGS = INTERNVL_SETTINGS | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
GOT = {
    "model_type": "got_ocr2",
    "vision_config": {"model_type": "got_ocr2_vision", "image_size": 56, "patch_size": 14},
    "image_token_index": 7,
}
DYNAMIC = {"image_processor_type": "GotOcr2ImageProcessorFast"}


@pytest.mark.parametrize("bounds", [(1, 12), (2, 6), (1, 1)])
@pytest.mark.parametrize("name", ["internvl", "aya"])
def test_tiles_by_shape_against_transformers(
    tmp_path: Path, name: str, bounds: tuple[int, int]
) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    config = INTERNVL if name == "internvl" else AYA
    settings = INTERNVL_SETTINGS if name == "internvl" else AYA_SETTINGS
    settings = settings | {"min_patches": bounds[0], "max_patches": bounds[1]}
    theirs = oracle.GotOcr2ImageProcessorPil(**settings, crop_to_patches=True)
    ours = processor(tmp_path, config, settings | DYNAMIC)
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        parts = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"]
        found = np.concatenate([pixels(part.item, config) for part in parts])
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() < 1e-3
        assert sum(part.item.tokens for part in parts) == 4 * len(wanted)
        if name == "internvl":
            assert [(part.before, part.after) for part in parts] == [("<img>", "</img>")]


@pytest.mark.parametrize("cuts", [False, True])
def test_got_ocr_cuts_pictures_where_its_settings_say(tmp_path: Path, cuts: bool) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    settings = {"size": {"height": 56, "width": 56}, "crop_to_patches": cuts}
    theirs = oracle.GotOcr2ImageProcessorPil(**settings)
    ours = processor(tmp_path, GOT, settings | DYNAMIC)
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        (part,) = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"]
        assert np.abs(pixels(part.item, GOT) - wanted).max() < 1e-3
        assert (part.item.tokens, part.before, part.after) == (len(wanted), "<img>", "</img>")


def test_pictures_of_opengvlabs_own_code(tmp_path: Path) -> None:
    """OpenGVLab's own code gives the conversion's pictures; the tokenizer's files have the id."""
    vision = {"model_type": "intern_vit_6b", "image_size": 56, "patch_size": 14}
    config = {"model_type": "internvl_chat", "vision_config": vision, "llm_config": LLAMA}
    config |= {"downsample_ratio": 0.5, "max_dynamic_patch": 6, "use_thumbnail": True}
    means = {key: INTERNVL_SETTINGS[key] for key in ("image_mean", "image_std")}
    settings = means | {"size": 56, "crop_size": 56, "resample": 3}
    converted = processor(tmp_path, INTERNVL, INTERNVL_SETTINGS | DYNAMIC | {"max_patches": 6})
    with pytest.raises(ModelError, match="IMG_CONTEXT"):
        processor(tmp_path, config, settings)
    with_token(tmp_path, "<IMG_CONTEXT>")
    ours = processor(tmp_path, config, settings)
    assert ours.placeholders.token == 7
    for seed, size in enumerate(SIZES):
        data = encoded(noise(*size, seed))
        assert ours.read(data, param="p") == converted.read(data, param="p")
    one = processor(tmp_path, config | {"dynamic_image_size": False}, settings)
    assert one.read(data, param="p")[0].item.tokens == 4
    with pytest.raises(ModelError, match="use_thumbnail"):
        processor(tmp_path, config | {"use_thumbnail": False}, settings)


def test_the_words_around_tiles_of_aya(tmp_path: Path) -> None:
    ours = processor(tmp_path, AYA, AYA_SETTINGS | DYNAMIC)
    parts = ours.read(encoded(noise(130, 60)), param="p")
    words = [(part.before, part.after) for part in parts]
    end = ("TILE_GLOBAL", "<|END_OF_IMG|>")
    assert words == [("<|START_OF_IMG|>TILE_1", ""), ("TILE_2", ""), end]
    (part,) = ours.read(encoded(noise(130, 60)), param="p", detail="low")
    assert (part.before, part.after) == ("<|START_OF_IMG|>TILE_GLOBAL", "<|END_OF_IMG|>")


COHERE = {"model_type": "cohere2_vision", "vision_config": SIGLIP, "image_token_id": 7}
COHERE_SETTINGS = AYA_SETTINGS | {"image_processor_type": "Cohere2VisionImageProcessorFast"}


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (512, 512, (1, 1)),
        (1024, 512, (1, 2)),
        (600, 400, (1, 2)),  # of three columns it is enlarged as much
        (400, 600, (2, 1)),
        (513, 513, (2, 2)),
        (5000, 3000, (3, 4)),  # too large for any
        (9000, 300, (1, 12)),
    ],
)
def test_the_canvas_of_command_a(width: int, height: int, grid: tuple[int, int]) -> None:
    assert best_canvas(height, width, 512, 12) == grid


def test_lines_of_command_a_end_behind_tiles(tmp_path: Path) -> None:
    settings = COHERE_SETTINGS | {"patch_size": 2}
    ours = processor(tmp_path, COHERE, settings)
    picture = noise(112, 56)
    parts = ours.read(encoded(picture), param="p")
    line, last = "<|IMG_LINE_BREAK|>", "<|IMG_LINE_BREAK|><|END_OF_IMG|>"
    words = [(part.before, part.after) for part in parts]
    assert words == [("<|START_OF_IMG|>", line), ("", line), ("", last)]
    assert [part.item.tokens for part in parts] == [4] * 3
    left = pixels(parts[0].item, COHERE)[0] * 127.5 + 127.5
    assert np.abs(left - np.asarray(picture)[:, :56].transpose(2, 0, 1)).max() < 1e-3
    (part,) = ours.read(encoded(picture), param="p", detail="low")
    assert (part.before, part.after) == ("<|START_OF_IMG|>", last)
    for key, value in (("patch_size", 3), ("crop_to_patches", False)):
        with pytest.raises(ModelError, match=f"{key} = {value}"):
            processor(tmp_path, COHERE, settings | {key: value})


def test_fewer_tokens_are_fewer_tiles(tmp_path: Path) -> None:
    ours = processor(tmp_path, INTERNVL, INTERNVL_SETTINGS | DYNAMIC)
    data = encoded(noise(900, 450))
    found = [ours.read(data, param="p", detail=n)[0].item.tokens for n in (4, 11, 12, 40, 99)]
    assert found == [4, 4, 12, 36, 36]
    with pytest.raises(RequestError, match="max_soft_tokens is 3"):
        ours.read(data, param="p", detail=3)


def test_frames_of_internvl_are_numbered(tmp_path: Path) -> None:
    settings = INTERNVL_SETTINGS | {"video_processor_type": "InternVLVideoProcessor"}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    ours = processor(tmp_path, INTERNVL, INTERNVL_SETTINGS | DYNAMIC, "video")
    info = VideoInfo(frames=100, fps=10.0)
    assert list(ours.sample_frames(info, 4)) == [12, 37, 62, 87]
    assert len(ours.sample_frames(info, 256)) == 8
    frames = (Frame(number, noise(90, 50, number)) for number in range(2))
    parts = ours.preprocess(info, frames, 2, "p", "auto")
    assert [part.before for part in parts] == ["Frame1: <img>", "\nFrame2: <img>"]
    assert [(part.item.kind, part.item.tokens) for part in parts] == [("video", 4)] * 2


def test_deepseek_with_two_encoders_against_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip(
        "transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid"
    )
    settings: dict[str, Any] = {
        "size": {"height": 56, "width": 56},
        "high_res_size": {"height": 112, "width": 112},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "high_res_image_mean": MEANS["image_mean"],
        "high_res_image_std": MEANS["image_std"],
    }
    large = {"model_type": "clip_vision_model", "image_size": 112, "patch_size": 14}
    config = DEEPSEEK | {"model_type": "deepseek_vl_hybrid", "high_res_vision_config": large}
    theirs = oracle.DeepseekVLHybridImageProcessorPil(**settings)
    named = settings | {"image_processor_type": "DeepseekVLHybridImageProcessor"}
    ours = processor(tmp_path, config, named)
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        (part,) = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")
        first = 3 * 112**2
        for start, end, vision, key in (
            (0, first, large, "high_res_pixel_values"),
            (first, None, SIGLIP, "pixel_values"),
        ):
            item = MediaItem.of("image", part.item.features[start:end], (1,), 16)
            assert np.abs(pixels(item, {"vision_config": vision}) - wanted[key]).max() < 1e-3
        assert part.item.tokens == 16
    with pytest.raises(ModelError, match="high_res_image_std"):
        processor(tmp_path, config, named | {"high_res_image_std": [1.0] * 3})

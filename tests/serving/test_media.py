"""Images on the HTTP side: what is held, what is hidden, what is placed where."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from quire.core.errors import RequestError
from quire.core.media import MediaItem
from quire.demo import MODEL_DIR
from quire.media.fetch import FetchPolicy
from quire.media.kinds import open_processors
from quire.media.parts import MediaPart, Parts
from quire.media.source import FileLimits, MediaLimits, MediaSource
from quire.serving.media import MediaLoader, as_template_reads, files_of
from tests.media.files import greys, tone, video
from tests.media.test_qwen_videos import omni


def url(colour: str) -> str:
    file = io.BytesIO()
    PIL.Image.new("RGB", (64, 64), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def asking(*colours: str) -> tuple[dict[str, Any], ...]:
    sources = [MediaSource(url(c), f"messages[0].content[{n}]", "x") for n, c in enumerate(colours)]
    parts: list[dict[str, Any]] = [{"type": "image", "source": source} for source in sources]
    return ({"role": "user", "content": [*parts, {"type": "text", "text": "?"}]},)


@pytest.fixture
def reader() -> MediaLoader:
    limits = MediaLimits(3, FileLimits(pixels=10_000))
    return MediaLoader(
        open_processors(Path(MODEL_DIR), ("text", "image", "video")),
        {"image": "<|image|>", "video": "<|video|>"},
        FetchPolicy(),
        {"image": limits, "video": limits},
    )


def items_of(messages: tuple[dict[str, Any], ...]) -> list[MediaItem]:
    return [part.item for parts in files_of(messages) for part in parts]


async def test_the_first_image_too_many_is_named(reader: MediaLoader) -> None:
    with pytest.raises(RequestError, match="at most 3") as refused:
        await reader.load(asking("red", "green", "blue", "black"))
    assert refused.value.param == "messages[0].content[3]"


async def test_pictures_beside_others_are_read_as_the_model_reads_several(
    reader: MediaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = items_of(await reader.load(asking("red")))
    monkeypatch.setattr(type(reader._processors["image"]), "detail_of_several", 140)
    several = items_of(await reader.load(asking("red", "blue")))
    assert [item.tokens for item in several] == [121, 121]
    assert alone.tokens == 64


def image(tokens: int) -> MediaItem:
    return MediaItem("image", b"", (1, tokens), tokens, bytes([tokens]))


def test_soft_tokens_take_the_places_of_marks(reader: MediaLoader) -> None:
    two, three = image(2), image(3)
    prompt = reader.places.place([1, 18, 5, 18, 6], [two, three])
    assert prompt.tokens == (1, 17, 18, 18, 19, 5, 17, 18, 18, 18, 19, 6)
    assert [(each.start, each.end) for each in prompt.media] == [(2, 4), (7, 10)]
    assert [each.item for each in prompt.media] == [two, three]


def test_kinds_may_have_one_token(reader: MediaLoader) -> None:
    """Pictures and a video's frames share a token; their marks tell them apart."""
    picture = reader._processors["image"]
    film = replace(picture.placeholders, mark="<film>")
    reader._processors["video"].placeholders = film
    loader = MediaLoader(
        reader._processors, {"image": "<|image|>", "video": "<|image|>"}, FetchPolicy(), {}
    )
    token = picture.placeholders.token
    shown, frames = image(2), replace(image(3), kind="video")
    rendered = loader.places.spell(
        "<|image|><film>", [(MediaPart(shown),), (MediaPart(frames, before="1:"),)]
    )
    assert rendered == "<|image|>1:<|image|>"
    assert loader.places.marks == {"<|image|>", "<film>"}
    found = loader.places.place([token, 5, token], [shown, frames])
    assert [each.item for each in found.media] == [shown, frames]


def test_an_image_without_a_place_is_refused(reader: MediaLoader) -> None:
    with pytest.raises(RequestError, match="placeholders for 1 of 2 media items"):
        reader.places.place([18], [image(1), image(2)])


def frame(time: str) -> MediaPart:
    return MediaPart(MediaItem("video", b"", (1, 2), 2, time.encode()), before=time)


def test_frames_stand_behind_their_times(reader: MediaLoader) -> None:
    picture: Parts = (MediaPart(image(3)),)
    film = (frame("00:00 "), frame(" 00:07 "))
    rendered = "Here <|image|> and <|video|>, <|vid\udc00eo|>"
    spelled = reader.places.spell(rendered, [picture, film])
    assert spelled == ("Here <|image|> and 00:00 <|video|> 00:07 <|video|>, <|vid\udc00eo|>")
    assert reader.places.spell(rendered, [picture]) == rendered
    prompt = reader.places.place(
        [1, 18, 5, 23, 6, 23], [picture[0].item, *(each.item for each in film)]
    )
    assert prompt.tokens == (1, 17, 18, 18, 18, 19, 5, 17, 23, 23, 19, 6, 17, 23, 23, 19)
    assert [each.item.kind for each in prompt.media] == ["image", "video", "video"]


def test_files_are_numbered_by_kind(reader: MediaLoader) -> None:
    """MiniCPM-V's files have a number each, before all of their parts."""
    for kind, processor in reader._processors.items():
        numbered = f"<{kind} {{}}>"
        processor.placeholders = replace(processor.placeholders, numbered=numbered)
    loader = MediaLoader(
        reader._processors, {"image": "<|image|>", "video": "<|video|>"}, FetchPolicy(), {}
    )
    picture: Parts = (MediaPart(image(3)),)
    rendered = "A <|image|> <|video|> <|image|>"
    spelled = loader.places.spell(rendered, [picture, (frame("1:"), frame("2:")), picture])
    assert spelled == ("A <image 0><|image|> <video 0>1:<|video|>2:<|video|> <image 1><|image|>")


def test_texts_are_joined_up_to_an_image() -> None:
    text = {"type": "text", "text": "a"}
    message = {"role": "user", "content": [text, text, {"type": "image", "image": 1}, text]}
    parts = as_template_reads(message)["content"]
    assert parts == [{"type": "text", "text": "a\na"}, {"type": "image"}, text]
    assert as_template_reads({"role": "user", "content": [text, text]})["content"] == "a\na"


def test_marks_may_be_text_that_is_no_token(reader: MediaLoader) -> None:
    """Phi-4's rows have no token of their own."""
    picture = reader._processors["image"]
    picture.placeholders = replace(picture.placeholders, mark="<image>", before=(), after=())
    loader = MediaLoader({"image": picture}, {"image": "<|image|>"}, FetchPolicy(), {})
    assert loader.places.marks_by_kind == {"image": "<image>"}
    rendered = loader.places.spell("<image>\na <im\udc00age>", [(MediaPart(image(2)),)])
    assert rendered == "<|image|>\na <im\udc00age>"


async def test_moments_of_a_video_stand_behind_their_times_beside_a_picture(
    tmp_path: Path,
) -> None:
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    pictures = halves | {"image_processor_type": "Qwen2VLImageProcessor"}
    videos = halves | {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 1}
    videos["size"] = {"shortest_edge": 4096, "longest_edge": 1 << 20}
    config = {"vision_config": {}, "image_token_id": 7, "video_token_id": 8}
    config["model_type"] = "qwen3_vl"
    for name, values in (("config", config), ("preprocessor_config", pictures)):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(videos))
    limits = MediaLimits(3, FileLimits())
    loader = MediaLoader(
        open_processors(tmp_path, ("image", "video")),
        {"image": "<|image_pad|>", "video": "<|video_pad|>"},
        FetchPolicy(),
        {"image": limits, "video": limits},
    )
    film = base64.b64encode(video(greys(40))).decode()  # four seconds
    source = MediaSource(f"data:video/mp4;base64,{film}", "p", "x", kind="video")
    (message,) = asking("red")
    message["content"].insert(0, {"type": "video", "source": source})

    files = files_of(await loader.load((message,)))
    written = "A<|vision_start|><|{}_pad|><|vision_end|>"
    spelled = loader.places.spell(written.format("video") + written.format("image"), files)

    moment = "<|vision_start|><|video_pad|><|vision_end|>"
    times = f"<0.7 seconds>{moment}<3.2 seconds>{moment}"
    assert spelled == f"A{times}{written.format('image')}"
    items = [part.item for parts in files for part in parts]
    prompt = loader.places.place([1, 8, 2, 8, 3, 7, 4], items)
    assert [each.item.kind for each in prompt.media] == ["video", "video", "image"]
    assert len(prompt.tokens) == 4 + sum(item.tokens for item in items)


async def test_the_sound_of_a_video_stands_between_its_moments(tmp_path: Path) -> None:
    limits = MediaLimits(1, FileLimits())
    ours = omni(tmp_path)
    loader = MediaLoader(
        {"video": ours}, {"video": "<|video_pad|>"}, FetchPolicy(), {"video": limits}
    )
    film = base64.b64encode(video(greys(20), sound=tone(1.5))).decode()
    source = MediaSource(f"data:video/mp4;base64,{film}", "p", "x", kind="video", sound=True)
    asked = ({"role": "user", "content": [{"type": "video", "source": source}]},)

    files = files_of(await loader.load(asked))
    spelled = loader.places.spell("<|vision_start|><|video_pad|><|vision_end|>", files)

    within = "<|audio_start|><|video_pad|><|audio_end|>"
    assert spelled == f"<|vision_start|>{within}<|vision_end|>"
    ((part,),) = files
    prompt = loader.places.place([1, 8, 2], [part.item])
    assert prompt.tokens == (1, *ours.tokens(part.item), 2)
    assert set(prompt.tokens) == {1, 2, 8, 9}

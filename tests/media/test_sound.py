"""Sound: files of each format, made here; transformers as the judge of features."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import ModelError, RequestError
from quire.media.kinds import KINDS, open_processors
from quire.media.processors.base import Placeholders
from quire.media.processors.gemma3n import Gemma3nAudioProcessor
from quire.media.processors.gemma4_audio import Gemma4AudioProcessor, Gemma4UnifiedAudioProcessor
from quire.media.processors.qwen_audio import QwenAudioProcessor
from quire.media.sound import Samples, decode, resampled
from quire.media.source import FileLimits
from tests.media.files import encoded_sound, tone, wav

RATE = 16_000
ENCODED = {"mp3": "libmp3lame", "flac": "flac", "ogg": "libopus", "adts": "aac", "mov": "aac"}
FEATURES: dict[str, Any] = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}


def heard(data: bytes, limits: FileLimits = FileLimits(), rate: int = RATE) -> Samples:  # noqa: B008
    return decode(data, param="p", rate=rate, limits=limits)


def refused(data: bytes, code: str = "media_invalid", limits: FileLimits = FileLimits()) -> str:  # noqa: B008
    with pytest.raises(RequestError) as caught:
        decode(data, param="messages[0].content[1]", rate=RATE, limits=limits)
    error = caught.value
    assert (error.code, error.status, error.param) == (code, 400, "messages[0].content[1]")
    return error.message


def heard_or_refused(data: bytes) -> None:
    """Anything but a refusal fails."""
    with suppress(RequestError):
        assert len(heard(data))


class TestWav:
    @pytest.mark.parametrize(
        ("bits", "code"), [(8, 1), (16, 1), (24, 1), (32, 1), (32, 3), (64, 3)]
    )
    def test_samples_come_back(self, bits: int, code: int) -> None:
        found = heard(wav(tone(0.1), bits=bits, code=code))
        assert found.dtype == np.float32
        assert np.abs(found - tone(0.1)).max() < (0.02 if bits == 8 else 1e-4)

    def test_channels_are_averaged(self) -> None:
        found = heard(wav(tone(0.1), 0 * tone(0.1), tone(0.1, 880.0)))
        assert np.abs(found - (tone(0.1) + tone(0.1, 880.0)) / 3).max() < 1e-4

    def test_an_unknown_length_is_the_length_of_the_data(self) -> None:
        assert len(heard(wav(tone(0.1), size=0xFFFFFFFF))) == 1600

    def test_a_file_that_was_cut_is_refused(self) -> None:
        assert "cut short" in refused(wav(tone(0.1))[:-2])
        refused(wav(tone(0.1))[:30])

    def test_no_samples(self) -> None:
        assert "holds no sound" in refused(wav(tone(0)))

    def test_samples_that_are_no_numbers(self) -> None:
        assert "no numbers" in refused(wav(tone(0.1) * np.nan, bits=32, code=3))

    def test_long_sounds_are_refused_by_their_header(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = wav(tone(2))
        monkeypatch.setattr(np, "frombuffer", None)  # no sample is looked at
        message = refused(data, "media_too_large", FileLimits(seconds=1.5))
        assert "2.0 s, more than 1.5 s" in message

    def test_without_pyav(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "av", None)
        assert len(heard(wav(tone(0.1)))) == 1600
        assert "quire-serve[media]" in refused(b"fLaC" + bytes(50), "media_unsupported")

    @settings(max_examples=200, deadline=None)
    @given(st.binary(max_size=60), st.integers(0, 60))
    def test_damaged_files_are_read_or_refused(self, noise: bytes, at: int) -> None:
        whole = wav(tone(0.01))
        heard_or_refused(whole[:at] + noise + whole[at + len(noise) :])


class TestOthers:
    @pytest.mark.parametrize("kind", ENCODED)
    def test_each_format(self, kind: str) -> None:
        rate = 48_000 if kind == "ogg" else RATE
        found = heard(encoded_sound(tone(0.5, rate=rate), kind, ENCODED[kind], rate))
        assert 0.5 <= len(found) / RATE < 0.7
        spectrum = np.abs(np.fft.rfft(found))
        assert abs(np.argmax(spectrum) / len(found) * RATE - 440) < 5
        assert 0.4 < np.abs(found).max() < 0.65

    def test_what_lasts_too_long_is_refused(self) -> None:
        for kind, codec in (("flac", "flac"), ("mp3", "libmp3lame")):
            data = encoded_sound(tone(2), kind, codec)
            assert "more than 1 s" in refused(data, "media_too_large", FileLimits(seconds=1))

    def test_other_formats_are_refused(self) -> None:
        for data in (
            b"",
            b"#EXTM3U\nfile:///etc/passwd",
            b"\x89PNG\r\n\x1a\n",
            b"MThd" + bytes(30),
        ):
            assert "not a WAV, MP3" in refused(data)

    def test_a_codec_that_is_not_named_is_refused(self) -> None:
        assert "codec is ac3" in refused(
            encoded_sound(tone(0.5, rate=48_000), "matroska", "ac3", 48_000)
        )

    @pytest.mark.parametrize("kind", ["flac", "mov"])
    def test_damaged_files_are_read_or_refused(self, kind: str) -> None:
        whole = encoded_sound(tone(0.3), kind, ENCODED[kind])
        rng = np.random.default_rng(5)
        for _ in range(60):
            data = bytearray(whole)
            for at in rng.integers(0, len(data), 6):
                data[at] = rng.integers(0, 256)
            heard_or_refused(bytes(data[: rng.integers(20, len(data))]))


class TestResampling:
    @pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
    def test_a_tone_keeps_its_frequency(self, rate: int) -> None:
        found = resampled(tone(0.5, 1000.0, rate).astype(np.float32), rate, RATE)
        assert len(found) == 8000
        assert np.abs(found - tone(0.5, 1000.0))[200:-200].max() < 1e-4

    def test_what_the_new_rate_cannot_hold_is_gone(self) -> None:
        found = resampled(tone(0.5, 12_000.0, 48_000).astype(np.float32), 48_000, RATE)
        assert np.abs(found)[200:-200].max() < 1e-4


def opened(tmp_path: Path, **changes: Any) -> Gemma4AudioProcessor:
    sizes = {"audio_token_id": 21, "boa_token_id": 20, "eoa_token_index": 22}
    (tmp_path / "config.json").write_text(json.dumps({"audio_config": {}, **sizes}))
    settings = {"feature_extractor": FEATURES | changes}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    found = KINDS["audio"].open(tmp_path)
    assert isinstance(found, Gemma4AudioProcessor)
    return found


class TestGemma4:
    def test_opening(self, tmp_path: Path) -> None:
        ours = opened(tmp_path)
        assert ours.placeholders == Placeholders(21, (20,), (22,))
        (part,) = ours.read(wav(tone(1)), param="p")
        item = part.item
        assert (item.kind, item.shape, item.tokens) == ("audio", (99, 128), 25)
        assert not item.bidirectional
        with pytest.raises(ModelError, match=r"feature_extractor\.preemphasis"):
            opened(tmp_path, preemphasis=0.97)

    def test_a_model_without_an_encoder(self, tmp_path: Path) -> None:
        opened(tmp_path)
        (tmp_path / "config.json").write_text('{"audio_config": null}')
        assert KINDS["audio"].open(tmp_path) is None

    def test_the_same_file_is_read_once(self, tmp_path: Path) -> None:
        ours = opened(tmp_path)
        first = ours.read(wav(tone(1)), param="p")
        assert ours.read(wav(tone(1)), param="q") is first
        other = ours.read(wav(tone(1, 880.0)), param="p")
        assert other[0].item.digest != first[0].item.digest

    def test_length(self, tmp_path: Path) -> None:
        ours = opened(tmp_path)
        with pytest.raises(RequestError, match=r"31\.0 s, more than 30\.1 s"):
            ours.read(wav(tone(31)), param="p")
        (part,) = ours.read(wav(tone(30)), param="p")
        assert part.item.tokens == 750
        with pytest.raises(RequestError, match="less than"):
            ours.read(wav(tone(0.01)), param="p")

    @pytest.mark.parametrize("changes", [{}, {"feature_size": 16, "fft_overdrive": True}], ids=str)
    def test_features_are_those_of_transformers(
        self, tmp_path: Path, changes: dict[str, Any]
    ) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.gemma4.feature_extraction_gemma4")
        theirs = oracle.Gemma4AudioFeatureExtractor(**changes)
        ours = opened(tmp_path, **changes)
        rng = np.random.default_rng(3)
        for length in (161, 320, 480, 1000, 15_999, 16_000, 16_001, 40_000):
            samples = (0.1 * rng.standard_normal(length)).astype(np.float32)
            out = theirs([samples], return_tensors="np")
            valid = int(out["input_features_mask"][0].sum())
            expected = out["input_features"][0][:valid]
            found = ours.features(samples)
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < 1e-3
            mask = out["input_features_mask"][0]
            assert ours.item(samples, "p").tokens == int(mask[::2][::2].sum())


class TestGemma4Unified:
    def open(self, folder: Path, **changes: Any) -> Gemma4UnifiedAudioProcessor:
        (folder / "config.json").write_text(json.dumps({"audio_config": {"hidden_size": 640}}))
        kind = {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor"}
        settings = {"feature_extractor": kind | changes}
        (folder / "processor_config.json").write_text(json.dumps(settings))
        found = KINDS["audio"].open(folder)
        assert isinstance(found, Gemma4UnifiedAudioProcessor)
        return found

    def test_opening(self, tmp_path: Path) -> None:
        ours = self.open(tmp_path)
        assert ours.placeholders == Placeholders(258_881, (256_000,), (258_883,))
        (part,) = ours.read(wav(tone(1)), param="p")
        item = part.item
        assert (item.kind, item.shape, item.tokens) == ("audio", (25, 640), 25)
        assert not item.bidirectional
        with pytest.raises(ModelError, match=r"feature_extractor\.feature_size = 320"):
            self.open(tmp_path, feature_size=320)
        with pytest.raises(RequestError, match="no samples"):
            ours.item(np.zeros(0, np.float32), "p")

    def test_features_are_those_of_transformers(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip(
            "transformers.models.gemma4_unified.feature_extraction_gemma4_unified"
        )
        sizes = {"feature_size": 320, "audio_samples_per_token": 320}
        rng = np.random.default_rng(3)
        for changes in ({}, sizes):
            theirs = oracle.Gemma4UnifiedAudioFeatureExtractor(**changes)
            ours = self.open(tmp_path, **changes)
            for length in (1, 639, 640, 641, 16_001):
                samples = (0.1 * rng.standard_normal(length)).astype(np.float32)
                out = theirs(samples, return_tensors="np")
                assert out["input_features_mask"].all()
                assert np.array_equal(ours.features(samples), out["input_features"][0])


class TestGemma3n:
    def open(self, folder: Path, **changes: Any) -> Gemma3nAudioProcessor:
        config = {"model_type": "gemma3n", "audio_config": {}, "audio_token_id": 9}
        (folder / "config.json").write_text(json.dumps(config))
        values = {"feature_extractor_type": "Gemma3nAudioFeatureExtractor"} | changes
        (folder / "preprocessor_config.json").write_text(json.dumps(values))
        found = KINDS["audio"].open(folder)
        assert isinstance(found, Gemma3nAudioProcessor)
        return found

    def test_opening(self, tmp_path: Path) -> None:
        assert self.open(tmp_path).placeholders.token == 9
        with pytest.raises(ModelError, match="preemphasis_htk_flavor"):
            self.open(tmp_path, preemphasis_htk_flavor=False)

    def test_any_sound_takes_as_many_rows(self, tmp_path: Path) -> None:
        ours = self.open(tmp_path)
        (part,) = ours.read(wav(np.zeros(8000)), param="p")
        assert (part.item.tokens, part.item.bidirectional) == (188, False)
        assert (part.before, part.after) == ("\n\n<start_of_audio>", "<end_of_audio>\n\n")
        with pytest.raises(RequestError, match="less than"):
            ours.item(np.zeros(100, np.float32), "p")

    def test_features_are_those_of_transformers(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.gemma3n.feature_extraction_gemma3n")
        theirs, ours = oracle.Gemma3nAudioFeatureExtractor(), self.open(tmp_path)
        rng = np.random.default_rng(3)
        for length in (513, 640, 1000, 16_000, 40_001):
            samples = (0.1 * rng.standard_normal(length)).astype(np.float32)
            out = theirs([samples], return_tensors="np")
            assert out["input_features_mask"].all()
            found = ours.features(samples)
            assert found.shape == out["input_features"][0].shape
            assert np.abs(found - out["input_features"][0]).max() < 1e-3


class TestQwen:
    def open(self, folder: Path, **changes: Any) -> QwenAudioProcessor:
        thinker = {"audio_config": {"n_window": 50}, "audio_token_id": 9}
        config = {"model_type": "qwen3_omni_moe", "thinker_config": thinker}
        (folder / "config.json").write_text(json.dumps(config))
        values = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
        (folder / "preprocessor_config.json").write_text(json.dumps(values | changes))
        found = KINDS["audio"].open(folder)
        assert isinstance(found, QwenAudioProcessor)
        return found

    def test_opening(self, tmp_path: Path) -> None:
        ours = self.open(tmp_path)
        assert ours.placeholders == Placeholders(9)
        (part,) = ours.read(wav(tone(2.5)), param="p")
        item = part.item
        assert (item.kind, item.shape, item.tokens) == ("audio", (250, 128), 33)
        assert not item.bidirectional
        with pytest.raises(ModelError, match="dither"):
            self.open(tmp_path, dither=0.1)

    def test_one_file_serves_all_kinds(self, tmp_path: Path) -> None:
        """Qwen3-Omni's published file holds the thinker's keys and nothing about videos."""
        thinker = {
            "model_type": "qwen3_omni_moe_thinker",
            "audio_config": {},
            "vision_config": {},
            "audio_token_id": 9,
            "image_token_id": 7,
            "video_token_id": 8,
        }
        settings = {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "patch_size": 16,
        }
        config = {"model_type": "qwen3_omni_moe", "thinker_config": thinker}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        opened = open_processors(tmp_path, ("image", "audio", "video"))
        assert {kind: each.placeholders.token for kind, each in opened.items()} == {
            "image": 7,
            "audio": 9,
            "video": 8,
        }

    def test_a_sound_may_be_long_but_not_of_a_moment(self, tmp_path: Path) -> None:
        ours = self.open(tmp_path)
        (part,) = ours.read(wav(tone(45)), param="p")
        assert part.item.tokens == 45 * 13
        with pytest.raises(RequestError, match="less than"):
            ours.read(wav(tone(0.01)), param="p")

    def test_features_are_those_of_transformers(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.whisper.feature_extraction_whisper")
        lengths = pytest.importorskip(
            "transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe"
        )._get_feat_extract_output_lengths
        theirs = oracle.WhisperFeatureExtractor(feature_size=128, return_attention_mask=True)
        ours = self.open(tmp_path)
        rng = np.random.default_rng(3)
        for length in (201, 319, 320, 1000, 15_999, 16_000, 16_001, 40_000):
            samples = (0.1 * rng.standard_normal(length)).astype(np.float32)
            out = theirs(
                [samples],
                sampling_rate=16_000,
                padding=True,
                truncation=False,
                return_attention_mask=True,
                return_tensors="np",
            )
            expected = out["input_features"][0].T
            found = ours.features(samples)
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < 1e-3
            frames = int(out["attention_mask"][0].sum())
            assert ours.item(samples, "p").tokens == lengths(frames)

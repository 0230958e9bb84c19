"""Whisper against transformers: features, what is attended to, logits and greedy tokens."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import SamplingParams
from quire.core.values import Values
from quire.media.processors.whisper import WhisperAudioProcessor
from quire.media.sound import Samples
from quire.models.weights.loader import LoadedModel, open_model
from quire.serving.transcripts import TranscriptTokens
from tests.models.solo import encoded
from tests.support.agreement import differ
from tests.support.parity import TOLERANCE, Company, prompts
from tests.support.whispering import (
    CONFIG,
    EXTRACTOR,
    FIRST,
    FIRST_TIME,
    IDS,
    NO_TIMES,
    START,
    write_files,
)

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import (  # noqa: E402
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from tests.models import oracle  # noqa: E402

Both = tuple[Any, LoadedModel]
PROMPT = (START, IDS["<|en|>"], IDS["<|transcribe|>"], NO_TIMES)
ANSWER = 12


def opened_reference(folder: Path) -> Both:
    torch.manual_seed(0)
    config = WhisperConfig(**deepcopy(CONFIG))
    reference = WhisperForConditionalGeneration._from_config(config, attn_implementation="eager")
    oracle.draw_anew(reference)
    reference.save_pretrained(folder)
    return reference.eval(), open_model(str(folder))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return opened_reference(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> WhisperAudioProcessor:
    file = tmp_path_factory.mktemp("whisper") / "x.json"
    return WhisperAudioProcessor.open(Values(EXTRACTOR, file=file), Values(CONFIG, file=file))


def noise(seed: int, seconds: float) -> Samples:
    """Return sound whose loudness and pitch change."""
    at = np.arange(int(seconds * 16000)) / 16000
    tone = np.sin(2 * np.pi * (200 + 40 * seed) * at * (1 + 0.1 * np.sin(at)))
    rough = np.random.default_rng(seed).normal(size=at.shape)
    return ((0.3 * tone + 0.05 * rough) * (0.6 + 0.4 * np.sin(3 * at))).astype(np.float32)


SOUNDS = {"short": noise(1, 0.4), "long": noise(2, 11.3), "whole": noise(3, 30)}


@pytest.mark.parametrize("name", SOUNDS)
def test_features_match(processor: WhisperAudioProcessor, name: str) -> None:
    extractor = WhisperFeatureExtractor()
    theirs = extractor(SOUNDS[name], sampling_rate=16000, return_tensors="np")["input_features"][0]
    ours = processor.features(SOUNDS[name])
    assert ours.shape == (3000, 80)
    assert np.abs(ours - theirs.T).max() < 1e-4


def features_of(item: MediaItem) -> Any:
    found = np.frombuffer(item.features, np.float32).reshape(item.shape).T
    return torch.from_numpy(found.copy())[None]


def test_what_is_attended_to_matches(opened: Both, processor: WhisperAudioProcessor) -> None:
    reference, loaded = opened
    item = processor.item(SOUNDS["long"], "file")
    with torch.no_grad():
        theirs = reference.model.encoder(features_of(item)).last_hidden_state[0]
    (ours,) = encoded(loaded.model.encoders["audio"], item)
    assert ours.shape == theirs.shape == (1500, 32)
    assert differ(ours, theirs) < 2e-4


def test_logits_and_tokens_match_side_by_side(
    opened: Both, processor: WhisperAudioProcessor
) -> None:
    """One engine gets several sounds and prompts: one sound twice, one late."""
    reference, loaded = opened
    items = {name: processor.item(each, "file") for name, each in SOUNDS.items()}
    earlier = (IDS["<|startofprev|>"], *b"hello", *PROMPT)
    cases = [("short", PROMPT), ("long", PROMPT), ("whole", earlier), ("long", earlier)]
    company = Company(loaded, EngineConfig("", kv_memory=32 << 20))
    asked = []
    for request, (name, prompt) in zip(
        prompts([1] * len(cases), tokens=ANSWER), cases, strict=True
    ):
        media = (PlacedMedia(0, items[name]),)
        asked.append(replace(request, prompt=prompt, media=media, max_tokens=ANSWER))
    found = company.run(asked)
    for request, (name, prompt) in zip(asked, cases, strict=True):
        own = found[request.id]
        ids = torch.tensor([[*prompt, *own.tokens]])
        with torch.no_grad():
            heard = reference.model.encoder(features_of(items[name]))
            theirs = reference(encoder_outputs=heard, decoder_input_ids=ids).logits[0]
        assert len(own.tokens) == ANSWER
        for at, token in enumerate(own.tokens, len(prompt)):
            assert differ(mx.array(own.logits[at]), theirs[at - 1]) < TOLERANCE
            assert token == int(theirs[at - 1].argmax())


def test_rows_without_a_sound_are_computed(opened: Both) -> None:
    """Steps that are measured before the first request have none."""
    _, loaded = opened
    company = Company(loaded, EngineConfig("", kv_memory=8 << 20))
    (request,) = prompts([5], tokens=3)
    assert len(company.run([replace(request, prompt=(1, 2, FIRST_TIME))])[request.id].tokens) == 3


@pytest.mark.parametrize("times", [False, True])
def test_transcripts_match_with_their_rules(
    opened: Both, processor: WhisperAudioProcessor, tmp_path: Path, times: bool
) -> None:
    """Suppressed tokens, pairs of times, and times that are likelier together than any text."""
    reference, loaded = opened
    write_files(tmp_path)
    reference.generation_config = GenerationConfig(
        decoder_start_token_id=START, eos_token_id=FIRST, pad_token_id=FIRST
    )
    tokens = TranscriptTokens.open(tmp_path)
    sampling = SamplingParams(temperature=0.0, times_from=tokens.first_time if times else None)
    company = Company(loaded, EngineConfig("", kv_memory=32 << 20))
    company.engine.constraints._eos_ids = frozenset({tokens.end})
    asked = []
    for request, sound in zip(prompts([1] * 3, tokens=40), SOUNDS.values(), strict=True):
        item = processor.item(sound, "file")
        prompt = tokens.prompt(item, "de", "translate", times=times)
        asked.append(
            replace(
                request,
                prompt=prompt.tokens,
                media=prompt.media,
                sampling=sampling,
                max_tokens=40,
                rules=tokens.rules(times=times),
                stop_token_ids=frozenset({tokens.end}),
            )
        )
    found = company.run(asked)
    kinds = set[bool]()
    for request in asked:
        settings = GenerationConfig.from_pretrained(tmp_path)
        settings.return_timestamps, settings.no_speech_threshold = times, None
        rules = reference._retrieve_logit_processors(
            settings, None, begin_index=len(request.prompt), num_beams=1, device="cpu"
        )
        with torch.no_grad():  # of one window: the model's own method goes on within the sound
            theirs = GenerationMixin.generate(
                reference,
                features_of(request.media[0].item),
                decoder_input_ids=torch.tensor([request.prompt]),
                logits_processor=LogitsProcessorList(rules),
                max_new_tokens=40,
                num_beams=1,
                do_sample=False,
            )[0].tolist()
        ours = found[request.id].tokens
        assert [*request.prompt, *ours] == theirs
        kinds |= {token >= tokens.first_time for token in ours}
    assert kinds == {False, True}

"""Gemma 4's assistants against transformers, and in the engine's steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.cache.specs import WindowKV
from quire.core.errors import ModelError
from quire.device.dtypes import DTYPES
from quire.models.families.gemma4_assistant import Assistant, build_assistant, named
from quire.models.weights.loader import LoadedModel, checked_config, load_drafter, open_model
from tests.models.solo import SoloStep
from tests.support import tiny_models

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")

from tests.models import oracle  # noqa: E402

TOKENS = [(7 * i * i + 3 * i) % 251 for i in range(48)]
"""More than the window."""
GUESSES = 3
FULL, SLIDING = tiny_models.FULL, tiny_models.SLIDING


def assistant_config(**changes: Any) -> Any:
    text = tiny_models.gemma4_config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        layer_types=[SLIDING, FULL],
        num_kv_shared_layers=2,
        attention_k_eq_v=False,
        vocab_size_per_layer_input=0,
        final_logit_softcapping=None,
    )
    return transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**text), backbone_hidden_size=64, **changes
    )


def write(folder: Path, config: Any, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    model = transformers.Gemma4AssistantForCausalLM(config)
    oracle.draw_anew(model)
    if model.masked_embedding is not None:
        order = torch.randperm(tiny_models.VOCABULARY)
        model.masked_embedding.token_ordering.copy_(order)
    model.save_pretrained(folder)
    return model.eval()


def opened(folder: Path, loaded: LoadedModel) -> Assistant:
    config = checked_config(folder)
    assistant = build_assistant(config, loaded.model, folder)
    load_drafter(assistant, folder, config, DTYPES[loaded.dtype], named)
    return assistant


def reference_guesses(model: Any, assistant: Any, end: int) -> list[list[float]]:
    """Return logits of the guesses after the first `end` tokens and the next one, as published."""
    with torch.no_grad():
        out = model(
            torch.tensor([TOKENS[:end]]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=True,
        )
        hidden = out.hidden_states[-1][:, -1:]
        token = torch.tensor([[TOKENS[end]]])
        found = []
        for _ in range(GUESSES):
            embedded = model.get_input_embeddings()(token)
            ahead = assistant(
                inputs_embeds=torch.cat([embedded, hidden], dim=-1),
                position_ids=torch.tensor([[end]]),
                shared_kv_states=out.shared_kv_states,
                use_cache=False,
            )
            found.append(ahead.logits[0, 0].tolist())
            token, hidden = ahead.logits.argmax(dim=-1), ahead.last_hidden_state
    return found


@pytest.mark.parametrize("ordered", [False, True])
def test_guesses_are_those_of_transformers(tmp_path: Path, ordered: bool) -> None:
    own = tiny_models.gemma4_config()
    reference = oracle.save_random(transformers.Gemma4TextConfig(**own), tmp_path / "model")
    clusters = {"use_ordered_embeddings": ordered, "num_centroids": 16}
    config = assistant_config(**clusters, centroid_intermediate_top_k=4)
    theirs = write(tmp_path / "assistant", config)
    loaded = open_model(str(tmp_path / "model"), dtype="float32")
    assistant = opened(tmp_path / "assistant", loaded)
    for end in (5, 32, 45):
        expected = reference_guesses(reference, theirs, end)
        step = SoloStep(loaded.model.layout, TOKENS[:end])
        hidden = loaded.model(step)
        # Transformers lets an assistant see one key more than the model's window.
        step._layout = tuple(
            replace(each, window=each.window + 1) if isinstance(each, WindowKV) else each
            for each in loaded.model.layout
        )
        tokens = mx.array(TOKENS[1 : end + 1])
        for wanted in expected:
            embedding = loaded.model.model.embedded(tokens)
            rows = assistant(hidden, embedding, step, step.positions + 1)
            logits, hidden = assistant.logits(rows), assistant.further(rows)
            tokens = mx.argmax(logits, axis=-1)
            ours, published = logits[-1], mx.array(wanted)
            seen = mx.isfinite(ours)
            assert int(seen.sum().item()) == (64 if ordered else 256)
            assert mx.max(mx.abs(mx.where(seen, ours - published, 0))).item() < 2e-4
            assert tokens[-1].item() == mx.argmax(published).item()


def test_an_assistant_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.tiny_model(tmp_path / "model", "gemma4")
    loaded = open_model(str(folder), dtype="float32")
    config = assistant_config().to_dict() | {"backbone_hidden_size": 128}
    with pytest.raises(ModelError, match="backbone_hidden_size is 128, the model's 64"):
        build_assistant(config, loaded.model, tmp_path)

"""Writes the embedded model as peers load it: what it writes and sees, without what it hears.

    python benchmarks/make_demo_model.py OUT

Peers refuse the tensors of the tower for sounds, which is smaller than those of published models
and has other parts, and mlx-lm reads the size of the vocabulary beside `text_config` alone. The
tensors for texts and pictures are the same, and so are the answers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx

from quire.demo import MODEL_DIR

_HEARING = ("model.audio_tower.", "model.embed_audio.")
_HEARING_KEYS = ("audio_config", "audio_token_id", "boa_token_id", "eoa_token_index")
_COPIED = (
    "chat_template.jinja",
    "generation_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def write_model(folder: Path) -> None:
    """Write the folder, which may be there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((MODEL_DIR / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in _HEARING_KEYS}
    config["vocab_size"] = config["text_config"]["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _COPIED:
        shutil.copyfile(MODEL_DIR / name, folder / name)
    tensors = mx.load(str(MODEL_DIR / "model.safetensors"))
    assert isinstance(tensors, dict)
    kept = {name: array for name, array in tensors.items() if not name.startswith(_HEARING)}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "pt"})


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    write_model(parser.parse_args().out)


if __name__ == "__main__":
    main()

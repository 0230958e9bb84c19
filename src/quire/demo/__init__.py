"""The model that the package carries, so that a bare `quire serve` has something to serve."""

from pathlib import Path

NAME = "quire-demo"
"""Name of the embedded model, for serving and on the command line."""

MODEL_DIR: Path = Path(__file__).parent / "model"
"""Path of the embedded model, in Hugging Face's format: a small Gemma 4, with tokenizer and chat
template.
"""


def name_of(place: str) -> str:
    """Return a place, or the embedded model's name for its folder."""
    return NAME if place == str(MODEL_DIR) else place


def place(model: str | None) -> str:
    """Return the folder, file or hub id of a model; by default that of the embedded model."""
    if not model or (model == NAME and not Path(model).exists()):
        return str(MODEL_DIR)
    return model

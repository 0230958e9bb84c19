"""The model that the package carries, so that a bare `quire serve` has something to serve."""

from pathlib import Path

NAME = "quire-demo"
"""By which it is served, and may be asked for where a model is named."""

MODEL_DIR: Path = Path(__file__).parent / "model"
"""A folder in Hugging Face's format: Gemma 4 in small, with tokenizer and chat template."""


def name_of(place: str) -> str:
    """A place, or the embedded model's name for its folder."""
    return NAME if place == str(MODEL_DIR) else place


def place(model: str | None) -> str:
    """The folder, file or hub id of a model; the embedded one's for its name, or for none."""
    if not model or (model == NAME and not Path(model).exists()):
        return str(MODEL_DIR)
    return model

"""Checkpoints in small parts, and the export that ships."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.chat import MODEL_DIR
from training.optimizer import Optimizer

PART = 15 * 1024 * 1024
"""Bytes of a part at most: what moves between machines is limited in file size."""


def save(folder: Path, model: nn.Module, optimizer: Optimizer, progress: dict[str, float]) -> None:
    """Weights in float32 and optimizer state, so that training can go on elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part*.pt"):
        old.unlink()
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizer.state().items()}
    part: dict[str, Tensor] = {}
    size = index = 0
    for name, value in tensors.items():
        nbytes = value.numel() * value.element_size()
        if size + nbytes > PART and part:
            torch.save(part, folder / f"part{index}.pt")
            part, size, index = {}, 0, index + 1
        part[name] = value.detach().cpu().clone()
        size += nbytes
    torch.save(part, folder / f"part{index}.pt")
    (folder / "progress.json").write_text(json.dumps(progress))


def load(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> dict[str, float]:
    """Take up weights, and the optimizer's state if the parts hold it; returns the progress."""
    tensors: dict[str, Tensor] = {}
    for part in sorted(folder.glob("part*.pt")):
        tensors |= torch.load(part, map_location="cpu")
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    model.load_state_dict(weights)
    if optimizer is not None:
        state = {
            name.removeprefix("optimizer."): value
            for name, value in tensors.items()
            if name.startswith("optimizer.")
        }
        if state:
            optimizer.load(state)
    progress: dict[str, float] = json.loads((folder / "progress.json").read_text())
    return progress


def begin_with(folder: Path, model: nn.Module) -> None:
    """Take up the weights of a model folder; what it lacks keeps its first values."""
    weights = load_file(str(folder / "model.safetensors"))
    _, unknown = model.load_state_dict({n: t.float() for n, t in weights.items()}, strict=False)
    if unknown:
        raise ValueError(f"{folder}: tensors that the model has no place for: {unknown}")


def export(folder: Path, model: nn.Module) -> None:
    """A folder that loads anywhere: the model's files with these weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in MODEL_DIR.iterdir():
        if file.name != "model.safetensors" and folder.resolve() != MODEL_DIR.resolve():
            shutil.copy(file, folder / file.name)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})

"""Trains the demonstration model in pieces: each run goes on from the last one's checkpoint.

    python -m training.train --out .train --total-steps 12000 --minutes 9
    python -m training.train --out .train --total-steps 12000 --minutes 9 --resume .train

Stops at its time or at the last step, whichever is first (without `--total-steps` the schedules
follow the clock), and leaves in `--out` the checkpoint, the
log and, under `model/`, a folder that transformers loads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training import checkpoint
from training.chat import MODEL_DIR
from training.data.mixture import items
from training.masks import block_masks, dense_masks
from training.model import Batch, Gemma4
from training.optimizer import Optimizer
from training.packing import collate, rows

SEED = 20261121
WARMUP = 100
DECAY_FROM = 0.55
"""Share of the steps after which the learning rate falls to nothing."""


@dataclass(frozen=True)
class Stage:
    """What the stream holds up to a share of the steps."""

    until: float
    long_share: float
    longest: int
    picture_share: float
    sound_share: float


STAGES = (
    Stage(0.05, 0.03, 40, 0.45, 0.10),
    Stage(0.15, 0.03, 120, 0.50, 0.10),
    Stage(0.30, 0.02, 240, 0.50, 0.10),
    Stage(1.01, 0.015, 440, 0.48, 0.10),
)


def stage_at(progress: float) -> Stage:
    """The stage of the curriculum for a share of the steps done."""
    return next(stage for stage in STAGES if progress < stage.until)


class Stream(IterableDataset[Batch]):
    """Endless packed batches, made in worker processes, each with its own seed."""

    def __init__(self, batch_rows: int, seed: int, progress: Any) -> None:
        self.batch_rows, self.seed, self.progress = batch_rows, seed, progress

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        rng = random.Random(f"{self.seed}:{worker.id if worker else 0}")
        while True:
            stage = stage_at(self.progress.value)
            stream = items(
                rng, stage.long_share, stage.longest, stage.picture_share, stage.sound_share
            )
            packed = rows(stream, rng)
            while stage_at(self.progress.value) is stage:
                yield collate([next(packed) for _ in range(self.batch_rows)])


def rate(steps: int, progress: float) -> float:
    """Learning-rate factor: a short warm-up in each piece, a plateau, a line down to zero."""
    warm = (steps + 1) / WARMUP
    left = (1 - progress) / (1 - DECAY_FROM)
    return max(0.0, min(1.0, left, warm))


@dataclass
class Run:
    """A piece of training and all that it needs."""

    model: Gemma4
    optimizer: Optimizer
    device: torch.device
    total: int | None
    out: Path
    peak: float
    step: int = 0
    tokens: int = 0

    def batches(self, batch_rows: int, workers: int, progress: Any) -> Iterator[Batch]:
        stream = Stream(batch_rows, SEED + self.step, progress)
        return iter(
            DataLoader(
                stream,
                batch_size=None,
                num_workers=workers,
                pin_memory=self.device.type == "cuda",
                prefetch_factor=4 if workers else None,
                multiprocessing_context="fork" if workers else None,
            )
        )

    def save(self) -> None:
        progress: dict[str, float] = {"step": self.step, "tokens": self.tokens}
        checkpoint.save(self.out, self.model, self.optimizer, progress)
        checkpoint.export(self.out / "model", self.model)

    def train(self, batches: Iterator[Batch], progress: Any, deadline: float, every: int) -> None:
        """Step until the deadline or the last step, logging as it goes."""
        cuda = self.device.type == "cuda"
        dtype = torch.bfloat16 if cuda else torch.float32
        window, start = self.model.config["text_config"]["sliding_window"], self.step
        forward: Any = torch.compile(self.model, dynamic=False) if cuda else self.model
        masks = block_masks if cuda else dense_masks
        sums, count, since = torch.zeros(2, device=self.device), 0, time.monotonic()
        began = since
        while progress.value < 1:
            batch = next(batches).to(self.device)
            with torch.autocast(self.device.type, dtype, enabled=cuda):
                loss, right = forward(batch, masks(batch, window), dtype)
            loss.backward()
            self.optimizer.step(self.peak * rate(self.step - start, progress.value))
            self.model.zero_grad(set_to_none=True)
            self.step += 1
            self.tokens += batch.tokens.numel()
            passed = (time.monotonic() - began) / (deadline - began)
            if self.total is None:
                progress.value = passed
            else:
                progress.value = 1 if passed >= 1 else self.step / self.total
            sums += torch.stack([loss.detach(), right])
            count += 1
            if self.step % every == 0:
                mean_loss, mean_right = (sums / count).tolist()
                pace = count * batch.tokens.numel() / (time.monotonic() - since)
                self.log(loss=mean_loss, right=mean_right, tokens_per_second=round(pace))
                sums, count, since = torch.zeros_like(sums), 0, time.monotonic()

    def log(self, **values: float) -> None:
        line = json.dumps({"step": self.step, "tokens": self.tokens, **values})
        print(line, flush=True)
        with (self.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--start", type=Path, help="a model folder whose weights to begin with")
    parser.add_argument("--peak", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--total-steps", type=int)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--log-every", type=int, default=100)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Gemma4(json.loads((MODEL_DIR / "config.json").read_text())).to(device)
    if options.start:
        checkpoint.begin_with(options.start, model)
    run = Run(model, Optimizer(model), device, options.total_steps, options.out, options.peak)
    if options.resume:
        done = checkpoint.load(options.resume, model, run.optimizer)
        run.step, run.tokens = int(done["step"]), int(done["tokens"])
    done_before = run.step / run.total if run.total else 0.0
    progress = multiprocessing.Value("d", done_before, lock=False)
    batches = run.batches(options.rows, options.workers, progress)
    run.train(batches, progress, deadline, options.log_every)
    run.save()


if __name__ == "__main__":
    main()

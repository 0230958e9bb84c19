"""Trains the head that drafts the demonstration model's tokens, on one core in some minutes.

python -m training.draft_head [--items 1400] [--epochs 6] [--positions FILE]

The head guesses the token after the next one from the model's last hidden state and the next
token, and so on from its own output: DeepSeek-V3's multi-token prediction (arXiv:2412.19437)
without attention. It learns what the model itself would say, not what is right.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForImageTextToText

from training.chat import MODEL_DIR
from training.data import text, tools
from training.data.item import Generator, draw
from training.packing import encode

MIXTURE: dict[Generator, float] = {
    text.json_object: 4,
    text.repeat: 4,
    text.thinking: 4,
    text.counting: 3,
    tools.one_call: 3,
    tools.several_calls: 3,
    text.arithmetic: 1,
    text.facts: 1,
    text.memory: 1,
    text.persona: 1,
    tools.answer_from_result: 1,
}
"""Skills, by how often they are drawn: those whose answers are long."""
WORDS = 768
"""Tokens that guesses are chosen from: the most frequent ones, 97 of 100 in answers. With a
quarter of the vocabulary a guess takes two fifths of the time.
"""
DEPTH = 3
"""Tokens that are guessed one after the other in training."""
_BATCH = 512
_ITEMS_AT_ONCE = 16
_RATE = 3e-3
_FEATURES = 0.1
"""Weight of the distance between the head's output and the model's next hidden state."""


class DraftHead(nn.Module):
    """From a hidden state and the embedding of the token that follows to the next hidden state."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-6)

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        """`[N, hidden]` each; returns `[N, hidden]`, as the model's final norm gives them."""
        joined = torch.cat([_unit(state), _unit(embedding)], dim=-1)
        x = self.fc(joined)
        y = _unit(x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        out: Tensor = self.norm(x)
        return out


def _unit(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def collect(items: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Run the model over generated conversations.

    Returns:
        Hidden states `[N, DEPTH + 1, hidden]` of consecutive tokens within answers, the tokens that
        follow each `[N, DEPTH + 1]`, and the embedding table, which is the head of logits, too.
    """
    model = AutoModelForImageTextToText.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    rng = random.Random(seed)
    chosen = rng.choices(list(MIXTURE), weights=list(MIXTURE.values()), k=items)
    encoded = [encode(draw(each, rng, "train")) for each in chosen]
    waiting = iter(sorted(encoded, key=lambda each: len(each.tokens)))
    states, tokens = [], []
    with torch.inference_mode():
        while batch := list(islice(waiting, _ITEMS_AT_ONCE)):
            longest = max(len(each.tokens) for each in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, each in enumerate(batch):
                ids[row, : len(each.tokens)] = torch.tensor(each.tokens)
                mask[row, : len(each.tokens)] = 1
            hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
            for row, each in enumerate(batch):
                for at in range(each.answer_from - 1, len(each.tokens) - DEPTH - 1):
                    states.append(hidden[row, at : at + DEPTH + 1].clone())
                    tokens.append(ids[row, at + 1 : at + DEPTH + 2])
    table = model.get_input_embeddings().weight.detach().clone()
    return torch.stack(states), torch.stack(tokens), table


def loss_of(
    head: DraftHead, states: Tensor, tokens: Tensor, said: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the share of right guesses by how far they look ahead `[DEPTH]`.

    Args:
        said: what the model itself says after each token, `[N, DEPTH + 1]`.
    """
    state, total = states[:, 0], states.new_zeros(())
    right, all_right = [], torch.ones(len(states), dtype=torch.bool)
    for ahead in range(DEPTH):
        state = head(state, table[tokens[:, ahead]])
        logits = state @ table.T  # the model caps them, which changes no order
        wanted = said[:, ahead + 1]
        total = total + functional.cross_entropy(logits, wanted) * 0.8**ahead
        total = total + _FEATURES * functional.smooth_l1_loss(state, states[:, ahead + 1])
        all_right = all_right & (logits.argmax(-1) == wanted)
        right.append(all_right.float().mean())
    return total, torch.stack(right)


def train(data: tuple[Tensor, Tensor, Tensor], epochs: int, width: int) -> DraftHead:
    """Train a head, and print its share of right guesses on a twentieth of the data."""
    states, tokens, table = data
    started = time.perf_counter()
    with torch.inference_mode():
        said = torch.cat([(each @ table.T).argmax(-1) for each in states.split(_BATCH)])
    said = said.clone()
    order = torch.randperm(len(states))
    kept, held_out = order[len(order) // 20 :], order[: len(order) // 20]
    head = DraftHead(table.shape[1], width)
    optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, weight_decay=0.01)
    steps = epochs * (len(kept) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps + 1)
    for epoch in range(epochs):
        for rows in kept[torch.randperm(len(kept))].split(_BATCH)[: len(kept) // _BATCH]:
            loss, _ = loss_of(head, states[rows], tokens[rows], said[rows], table)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        with torch.inference_mode():
            own = states[held_out], tokens[held_out], said[held_out]
            _, right = loss_of(head, *own, table)
        shares = ", ".join(f"{share:.3f}" for share in right.tolist())
        seconds = time.perf_counter() - started
        print(f"epoch {epoch + 1}: {shares} right, {seconds:.0f} s", flush=True)
    return head


def frequent(tokens: Tensor, count: int) -> Tensor:
    """Return the most frequent tokens, int32 `[count]`, in ascending order."""
    best = torch.bincount(tokens[:, 0]).topk(count).indices
    return best.sort().values.to(torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=1400)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--positions", type=Path, help="where the model's states are kept")
    parser.add_argument("--out", type=Path, default=MODEL_DIR / "draft_head" / "model.safetensors")
    options = parser.parse_args()
    torch.manual_seed(0)
    kept: Path | None = options.positions
    data = torch.load(kept) if kept and kept.exists() else collect(options.items, seed=0)
    if kept and not kept.exists():
        torch.save(data, kept)
    print(f"{len(data[0])} positions", flush=True)
    head = train(data, options.epochs, options.width)
    weights = {name: each.detach().to(torch.bfloat16) for name, each in head.state_dict().items()}
    weights["tokens"] = frequent(data[1], WORDS)
    options.out.parent.mkdir(exist_ok=True)
    save_file(weights, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

"""Muon for the matrices, Adam for everything else, one learning-rate factor over both."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MATRIX_RATE = 0.02
OTHER_RATE = 2e-3
MOMENTUM = 0.95


def orthogonal(update: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, by five Newton-Schulz steps. `[N, R, C]`."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = x.mT if tall else x
    return out


class Optimizer:
    """Matrices of one shape are stepped together; their momentum is one stacked tensor."""

    def __init__(self, model: nn.Module) -> None:
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name:
                groups[parameter.shape[0], parameter.shape[1]].append(parameter)
            else:
                others.append(parameter)
        self.groups = list(groups.values())
        self.momenta = [torch.zeros_like(torch.stack(list(group))) for group in self.groups]
        fused = others[0].is_cuda
        self.adam = torch.optim.Adam(others, lr=OTHER_RATE, betas=(0.9, 0.98), fused=fused)
        self.orthogonal = torch.compile(orthogonal) if fused else orthogonal

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at `factor` times the base rates."""
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = self.orthogonal(gradient.lerp(momentum, MOMENTUM)).float()
            rows, columns = group[0].shape
            rate = factor * MATRIX_RATE * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(list(group), list(update.unbind()), alpha=-rate)
        for settings in self.adam.param_groups:
            settings["lr"] = factor * OTHER_RATE
        self.adam.step()

    def state(self) -> dict[str, Tensor]:
        """Momenta and moments by name, in half precision: enough to go on from."""
        state = {f"momentum.{i}": m.bfloat16() for i, m in enumerate(self.momenta)}
        for index, slots in self.adam.state_dict()["state"].items():
            state[f"adam.{index}.mean"] = slots["exp_avg"].bfloat16()
            state[f"adam.{index}.square"] = slots["exp_avg_sq"].bfloat16()
            state[f"adam.{index}.step"] = slots["step"]
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Take up where `state` was written."""
        for index, momentum in enumerate(self.momenta):
            momentum.copy_(state[f"momentum.{index}"])
        saved = self.adam.state_dict()
        count = len(saved["param_groups"][0]["params"])
        saved["state"] = {
            index: {
                "exp_avg": state[f"adam.{index}.mean"].float(),
                "exp_avg_sq": state[f"adam.{index}.square"].float(),
                "step": state[f"adam.{index}.step"],
            }
            for index in range(count)
        }
        self.adam.load_state_dict(saved)

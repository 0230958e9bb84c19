"""Averages the weights before and after a piece of training (arXiv:2109.01903).

A share of the earlier weights keeps skills that the piece did not show, at the cost of none that it
taught, as long as the share is small.

python -m training.average --earlier OLD --later src/quire/demo/model --share 0.9
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def averaged(earlier: Path, later: Path, share: float) -> dict[str, torch.Tensor]:
    """`share` of the later weights and the rest of the earlier ones, in the later ones' types.

    Raises:
        ValueError: the two are not of one model.
    """
    old, new = load_file(earlier / WEIGHTS), load_file(later / WEIGHTS)
    if {name: each.shape for name, each in old.items()} != {n: w.shape for n, w in new.items()}:
        raise ValueError(f"{earlier} and {later} hold other tensors")
    return {
        name: (share * each.float() + (1 - share) * old[name].float()).to(each.dtype)
        for name, each in new.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--earlier", type=Path, required=True)
    parser.add_argument("--later", type=Path, required=True, help="its weights are replaced")
    parser.add_argument("--share", type=float, required=True, help="of the later weights, 0 to 1")
    options = parser.parse_args()
    weights = averaged(options.earlier, options.later, options.share)
    path = options.later / WEIGHTS
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(weights, path, metadata)


if __name__ == "__main__":
    main()

"""How a process joins the others that compute the same model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.errors import ModelError
from quire.device.ranks import Part, join


@pytest.mark.parametrize(("backend", "ring"), [("jaccl", None), ("jaccl-ring", "1")])
def test_jaccl_gets_what_mlx_launch_gives_it(
    backend: str, ring: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables as in `launch_jaccl` of MLX's launcher. JACCL itself needs Macs with RDMA."""
    monkeypatch.setattr(os, "environ", {})
    rdma = [[None, "rdma_en2"], [["rdma_en2", "rdma_en3"], None]]
    found: dict[str, Any] = {}

    def init(strict: bool, backend: str) -> None:
        found.update(os.environ, backend=backend, strict=strict)
        found["devices"] = json.loads(Path(os.environ["MLX_IBV_DEVICES"]).read_text())
        raise RuntimeError("no device of RDMA")

    monkeypatch.setattr(mx.distributed, "init", init)
    addresses = [["10.0.0.1:32323"], ["10.0.0.2:32323"]]
    with pytest.raises(ModelError, match=f"cannot connect over {backend}: no device of RDMA"):
        join(Part(1, 2), addresses, backend, rdma)
    assert (found["backend"], found["strict"]) == ("jaccl", True)
    assert found["MLX_RANK"] == "1"
    assert found["MLX_JACCL_COORDINATOR"] == "10.0.0.1:32323"
    assert found.get("MLX_JACCL_RING") == ring
    assert found["devices"] == rdma

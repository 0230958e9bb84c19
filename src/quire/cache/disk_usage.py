"""Reads how much a disk tier's folder holds, also while a server writes to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.cache.disk_file import file_in
from quire.cache.disk_sql import Damaged, StoreError, connect, translated


@dataclass(frozen=True, slots=True)
class ModelUse:
    """Disk usage of one model. Times are seconds since the epoch; bytes are those of values."""

    fingerprint: str
    name: str
    blocks: int
    bytes: int
    hits: int
    made: float
    last: float


def usage(folder: Path) -> list[ModelUse]:
    """Return the disk usage of a folder, by model, also while a server uses it.

    Raises:
        StoreError: there is no store, or it cannot be read.
    """
    path = file_in(folder)
    db = connect(path, own=False)
    try:
        with translated():
            rows = db.execute(
                "SELECT fingerprint, name, count(entries.id), total(bytes), total(hits), "
                "min(made), max(last) FROM models LEFT JOIN entries ON model = models.id "
                "GROUP BY models.id ORDER BY max(last) DESC"
            ).fetchall()
    except Damaged as damage:
        raise StoreError(f"{path}: damaged ({damage})") from damage
    finally:
        db.close()
    return [
        ModelUse(
            str(f),
            str(n),
            blocks=blocks,
            bytes=int(size),
            hits=int(hits),
            made=made or 0.0,
            last=last or 0.0,
        )
        for f, n, blocks, size, hits, made, last in rows
    ]

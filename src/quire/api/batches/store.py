"""Uploaded files and batches on disk, separate for each API key.

For each key, a folder has `files/ID` with `files/ID.json`, and `batches/ID.json` with answers in
`batches/ID.answers`. Records are written whole and renamed into place, so a killed process leaves
either the old or the new record.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from quire.api.shared.auth import EVERYONE
from quire.api.shared.storage import storage
from quire.core.errors import NotFound, QuireError, RequestError, StorageFailed, TooLarge

log = logging.getLogger("quire.batches")

DAY_S = 24 * 3600
_ID = re.compile(r"(file-|batch_|msgbatch_)[0-9a-f]{32}", re.ASCII)
_EVERYONE = "everyone"
_FOLDER = "folder of files"

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


def new_id(prefix: str) -> str:
    """Return an id that no other file or batch has."""
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Record:
    """A file or a batch, without its contents. Times are seconds since 1970."""

    id: str
    created_at: int


Kept = TypeVar("Kept", bound=Record)


@dataclass(frozen=True, slots=True)
class FileRecord(Record):
    """An uploaded file, or the answers of a batch."""

    bytes: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def body(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {**asdict(self), "object": "file", "status": "processed", "status_details": None}


@dataclass(frozen=True, slots=True)
class BatchRecord(Record):
    """A batch of either protocol.

    Attributes:
        endpoint: route of its requests.
        input_file_id: the file of its requests.
        status: the status, in OpenAI's terms.
        times: when the batch entered each status.
        errors: why it failed: the lines that are not requests.
        total, succeeded, failed: requests, and those that were answered, with an error or without;
            while it runs, the file of answers has the last word.
        output_expires_s: after how many seconds the files of answers expire; None is never.
    """

    endpoint: str
    input_file_id: str
    status: Status = "validating"
    expires_at: int = 0
    times: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    succeeded: int = 0
    failed: int = 0
    output_expires_s: int | None = None

    @property
    def over(self) -> bool:
        """Whether the batch is finished, failed, expired or cancelled."""
        return self.status in ("failed", "completed", "expired", "cancelled")

    def becomes(self, status: Status, **changes: Any) -> BatchRecord:
        """Return the record with another status, from now on."""
        times = {**self.times, status: int(time.time())}
        return replace(self, status=status, times=times, **changes)


class Records(Generic[Kept]):
    """Records of one kind, in memory and as files of a folder."""

    def __init__(self, folder: Path, kind: type[Kept]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._kept: dict[str, Kept] = {}
        for path in folder.glob("*.json"):
            try:
                record = kind(**json.loads(path.read_text("utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path.name} is damaged, delete it: {error}") from error
            self._kept[record.id] = record

    def __iter__(self) -> Iterator[Kept]:
        """Yield the records, the newest first."""
        return iter(sorted(self._kept.values(), key=lambda r: (r.created_at, r.id), reverse=True))

    def get(self, record_id: str, what: str, *, param: str = "id") -> Kept:
        """Return a record. Raise `NotFound` about the field `param` if there is none of this id."""
        record = self._kept.get(record_id)
        if record is None:
            raise NotFound(
                f"There is no {what} '{record_id[:80]}' here.", param=param, code="not_found"
            )
        return record

    def note(self, record: Kept) -> None:
        """Store a record in memory only."""
        self._kept[record.id] = record

    def put(self, record: Kept) -> None:
        """Store a record in memory and on disk. Raise `StorageFailed` if it cannot be written."""
        assert _ID.fullmatch(record.id)
        path = self.folder / f"{record.id}.json"
        partial = path.with_suffix(".tmp")
        with storage(_FOLDER):
            with partial.open("w", encoding="utf-8") as file:
                json.dump(asdict(record), file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        self.note(record)

    def path(self, record_id: str, suffix: str = "") -> Path:
        """Return the path of a record's contents."""
        assert _ID.fullmatch(record_id)
        return self.folder / f"{record_id}{suffix}"

    def drop(self, record_id: str, *suffixes: str) -> None:
        """Delete a record with its contents."""
        with storage(_FOLDER):
            for suffix in (*suffixes, ".json"):
                self.path(record_id, suffix).unlink(missing_ok=True)
        self.forget(record_id)

    def forget(self, record_id: str) -> None:
        """Drop a record from memory only. The next start finds it again."""
        del self._kept[record_id]


class CallerFiles:
    """The files and batches of one API key.

    Args:
        max_bytes: the most bytes of all its files together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.files = Records(folder / "files", FileRecord)
        self.batches = Records(folder / "batches", BatchRecord)
        self.max_bytes = max_bytes

    def drop_expired(self) -> None:
        """Delete expired files, except those that unfinished batches need."""
        now = time.time()
        expired = [f.id for f in self.files if f.expires_at is not None and f.expires_at <= now]
        for file_id in expired:
            if self._needs(file_id) is not None:
                continue
            try:
                self.files.drop(file_id, "")
            except StorageFailed as error:
                log.warning("an expired file stays on disk: %s", error)
                self.files.forget(file_id)

    def _needs(self, file_id: str) -> BatchRecord | None:
        """Return an unfinished batch that reads a file."""
        batches = (each for each in self.batches if not each.over)
        return next((each for each in batches if each.input_file_id == file_id), None)

    def room(self) -> int:
        """Return how many bytes may be added. Expired files are deleted first."""
        self.drop_expired()
        return self.max_bytes - sum(each.bytes for each in self.files)

    def add_file(
        self,
        contents: Iterable[bytes],
        filename: str,
        purpose: str,
        *,
        file_id: str = "",
        expires_at: int | None = None,
    ) -> FileRecord:
        """Store a file.

        Args:
            file_id: a new one if empty.

        Raises:
            TooLarge: there is no room for it.
            StorageFailed: the folder cannot be written.
        """
        file_id = file_id or new_id("file-")
        path, room, size = self.files.path(file_id), self.room(), 0
        try:
            with storage(_FOLDER), path.open("wb") as file:
                for piece in contents:
                    size += len(piece)
                    if size > room:
                        raise TooLarge(
                            f"The files of this API key would take more than {self.max_bytes} "
                            "bytes together; delete some (DELETE /v1/files/ID), or start the "
                            "server with a larger "
                            "--files-bytes.",
                            code="storage_full",
                        )
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        record = FileRecord(
            file_id,
            int(time.time()),
            size,
            filename=filename[:255] or "file",
            purpose=purpose,
            expires_at=expires_at,
        )
        self.files.put(record)
        return record

    def drop_file(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            NotFound: there is no file with this id.
            RequestError: an unfinished batch needs it.
        """
        self.files.get(file_id, "file")
        if (batch := self._needs(file_id)) is not None:
            raise RequestError(
                f"The batch {batch.id} needs this file; cancel it first.",
                param="file_id",
                code="file_in_use",
            )
        self.files.drop(file_id, "")


class FileStore:
    """The files and batches of all API keys, in one folder that only this server uses.

    Raises:
        QuireError: the folder cannot be used, or another server uses it.
    """

    def __init__(self, folder: Path, callers: Iterable[str], max_bytes: int) -> None:
        who = set(callers) or {EVERYONE}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._of = {
                each: CallerFiles(folder / (each or _EVERYONE), max_bytes // len(who))
                for each in who
            }
        except BlockingIOError as error:
            raise QuireError(f"--files: another server uses {folder}") from error
        except (OSError, ValueError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise QuireError(f"--files: {folder}: {reason}") from error

    def of(self, caller: str) -> CallerFiles:
        """Return the files of a caller."""
        return self._of[caller]

    def all(self) -> Iterator[tuple[str, CallerFiles]]:
        """Yield all callers with their files."""
        yield from self._of.items()

    def close(self) -> None:
        """Unlock the folder, so that another server can use it."""
        self._lock.close()

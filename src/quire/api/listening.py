"""The socket that a server listens on: at a host and a port, or at a path (a Unix socket)."""

from __future__ import annotations

import contextlib
import errno
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from quire.core.errors import QuireError
from quire.core.unix_sockets import unix_path


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a server's address within the context, before a model is opened: an address that is in
    use is reported at once.

    A Unix socket also listens from then on, for another server could not tell it from one that
    was left behind; connections wait until they are accepted. Its file is removed at the end.

    Args:
        host: a name or an address, or `unix:PATH`.
        port: 0 is a free one. A Unix socket has none.

    Raises:
        QuireError: the address cannot be bound.
    """
    path = unix_path(host)
    listener = _at_port(host, port) if path is None else _at_path(Path(path))
    with contextlib.closing(listener):
        try:
            yield listener
        finally:
            if path is not None:
                Path(path).unlink(missing_ok=True)


def listen(listener: socket.socket) -> None:
    """Let clients connect.

    Raises:
        QuireError: another server bound the same port and listens there since.
    """
    try:
        listener.listen()
    except OSError as error:
        raise _unbound(url_of(listener).removeprefix("http://"), error) from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of a server's socket; `unix:PATH` of a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _at_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _unbound(f"{host}:{port}", error) from error
    return listener


def _unbound(address: str, error: OSError) -> QuireError:
    taken = error.errno == errno.EADDRINUSE
    hint = "; --port takes another, --port 0 a free one" if taken else ""
    return QuireError(f"cannot bind {address}: {error.strerror}{hint}")


def _at_path(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_unused(path)
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        why = "a server listens there, or it is another file" if taken else error.strerror or error
        raise QuireError(f"cannot bind unix:{path}: {why}") from error
    return listener


def _remove_unused(path: Path) -> None:
    """Remove the file of a Unix socket on which nobody listens, as a killed server leaves it."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            try:
                client.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()

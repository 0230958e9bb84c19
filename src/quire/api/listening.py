"""The socket that a server listens on, at a host and a port or at a path (a Unix socket), and the
rule that a server needs an API key if other machines reach it.

Imports little: a server checks its address before anything else is started.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from quire.core.config import ServerConfig
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
    if path is None:
        with contextlib.closing(_at_port(host, port)) as listener:
            yield listener
        return
    with contextlib.closing(_at_path(Path(path))) as listener, _removed(Path(path)):
        yield listener


def check_exposure(config: ServerConfig, *, allow_anyone: bool) -> None:
    """Refuse to serve strangers by accident.

    Args:
        allow_anyone: the operator asked a second time for an open server without a key.

    Raises:
        QuireError: the host is reachable from other machines and no key is set.
    """
    if config.api_keys or allow_anyone or is_loopback(config.host):
        return
    raise QuireError(
        f"Binding {config.host} lets other machines connect, and no API key is set. "
        "Set --api-key-file, or add --allow-anyone to serve everybody without a key."
    )


def is_loopback(host: str) -> bool:
    """Return whether a host to bind can be reached from this machine only."""
    if host == "localhost" or unix_path(host) is not None:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


@contextlib.contextmanager
def _removed(path: Path) -> Iterator[None]:
    """Remove the socket's file at the end of the context, unless another server has taken its path
    since: this server no longer listens while its models are closed.
    """
    ours = _identity(path)
    try:
        yield
    finally:
        if _identity(path) == ours:
            path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return what tells a file from a later one at the same path; None if there is none.

    The time is part of it, because file systems use the number of a removed file again.
    """
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_dev, found.st_ino, found.st_ctime_ns
    return None


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

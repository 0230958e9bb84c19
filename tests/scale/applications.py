"""Quire as an application of a Ray that runs on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.e2e.client import Client
from tests.support.child import Child

NAME = "tested"


class Application:
    """A running application.

    Attributes:
        url: where Ray's proxy listens.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, **arguments: Any) -> None:
        """Deploy the application, or change it; the arguments are those of `Arguments`."""
        from ray import serve

        from quire.scale.arguments import Arguments
        from quire.scale.ray import app

        serve.run(app(Arguments(**arguments)), name=NAME, route_prefix="/")

    def replicas(self) -> dict[str, int]:
        """Return the number of replicas by Ray's states: RUNNING, STARTING, STOPPING and others."""
        from ray import serve

        deployment = serve.status().applications[NAME].deployments["replicas"]
        return {str(state): count for state, count in deployment.replica_states.items()}


@contextmanager
def application(port: int, **arguments: Any) -> Iterator[Application]:
    """Start Ray and the application; end both."""
    import ray
    from ray import serve

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=8, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        running = Application(port)
        running.deploy(**arguments)
        yield running
    finally:
        serve.shutdown()
        ray.shutdown()


class Load:
    """Clients that ask one prompt after another until they are stopped.

    Attributes:
        answers: prompts' numbers and their answers.
    """

    def __init__(self, url: str, clients: int) -> None:
        self.answers: list[tuple[int, str]] = []
        self._stopped = [False] * clients
        self._pool = ThreadPoolExecutor(clients)
        self._asking: list[Future[None]] = [
            self._pool.submit(self._ask, url, number) for number in range(clients)
        ]

    def stop(self, *, but: int = 0) -> None:
        """Stop all clients except the first `but`; raise what one of the stopped met."""
        for number in range(but, len(self._asking)):
            self._stopped[number] = True
        for asking in self._asking[but:]:
            asking.result()

    def assert_same_as(self, child: Child) -> None:
        """Assert that a dozen of the answers are those of one server."""
        with Client(child.url) as one:
            for number, text in self.answers[:: max(1, len(self.answers) // 12)]:
                assert text == _answer(one, number)

    def _ask(self, url: str, client: int) -> None:
        number = client
        with Client(url) as connection:
            while not self._stopped[client]:
                self.answers.append((number, _answer(connection, number)))
                number += len(self._stopped)


def _answer(client: Client, number: int) -> str:
    return client.text(f"{number} and then", max_tokens=40, ignore_eos=True)

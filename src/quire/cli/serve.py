"""`quire serve`: serves models over HTTP."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from quire.api.listening import bound, check_exposure
from quire.cli.loading import OnProgress, loading
from quire.cli.model_configs import TableError, model_configs
from quire.cli.server_options import ServerOptions
from quire.cli.settings import Command, config_file
from quire.core.config import ModelConfig, ServerConfig
from quire.core.errors import QuireError
from quire.core.logs import write_logs
from quire.core.model_place import check_places
from quire.core.processes import allow_many_descriptors
from quire.core.stop_signals import interrupts_wait
from quire.serving.engine_process import EngineProcess, start_engine

if TYPE_CHECKING:
    from quire.serving.models import Opener


class ServeCommand(ServerOptions, Command):
    """Serves models over HTTP: OpenAI's chat completions, completions and responses, Anthropic's
    messages. One model is loaded at the start; of several each when it is first asked for.
    """

    command: ClassVar[str] = "serve"
    summary: ClassVar[str] = "serve models over HTTP"

    def run(self) -> int:
        """Serve until interrupted. Return 1 if the engine broke down."""
        return self.serve(loading(self.log_format))

    def serve(self, on_progress: OnProgress) -> int:
        """Serve until a signal comes, and report progress of loading. Return the exit status.

        Args:
            on_progress: called with a model's name and its progress of loading.
        """
        write_logs(self.log_level, self.log_format)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        server = self.server_config()
        try:
            configs = model_configs(self, server)
        except TableError as error:
            raise QuireError(f"{config_file(self.config)}: {error}") from error
        for each in configs:
            check_places(each.engine)
        check_exposure(server, allow_anyone=self.allow_anyone)
        with contextlib.ExitStack() as ending:
            listener = ending.enter_context(bound(server.host, server.port))
            started = None
            if len(configs) == 1 and self.replicas is None:
                started = _started(*configs)
                ending.callback(started.end)
            return self._serve(configs, server, on_progress, listener=listener, started=started)

    def _serve(
        self,
        configs: Sequence[ModelConfig],
        server: ServerConfig,
        on_progress: OnProgress,
        *,
        listener: socket.socket,
        started: EngineProcess | None,
    ) -> int:
        # Here, because every command loads this module and no other needs a web server. The modules
        # take seconds to import, in which the engine starts.
        with interrupts_wait():
            from quire.api.server import serve
            from quire.serving.mcp import check_usable
            from quire.text.dialects import named

        check_usable(server.mcp_servers, asked=server.mcp)
        for each in configs:  # what is wrong is known before a model is loaded
            if each.serving.dialect:
                named(each.serving.dialect)
        opener = None if self.replicas is None else self._replicated(len(configs))
        return serve(
            configs,
            server,
            listener=listener,
            memory=self.memory,
            on_progress=on_progress,
            opener=opener,
            started=started,
        )

    def _replicated(self, models: int) -> Opener:
        """Return the opener of a model that is served by replicas.

        Raises:
            QuireError: there are several models, or Ray is not installed.
        """
        if models > 1:
            raise QuireError(f"--replicas works with one model only, and {models} are configured")
        if find_spec("ray") is None:
            raise QuireError("--replicas needs Ray: pip install 'quire-serve[ray]'")
        from quire.scale.deployments import Scaling
        from quire.scale.local import local_opener

        assert self.replicas is not None
        return local_opener(Scaling(self.replicas, self.max_replicas))


def _started(model: ModelConfig) -> EngineProcess:
    """Start the engine of a model."""
    allow_many_descriptors()  # which its process inherits
    return start_engine(model.engine, model.serving.log_level, model.serving.log_format)

"""Grammar compilation in jobs, so that a crash costs one request.

The compiler is native code that a client's schema may send into endless recursion or keep busy for
any time. A grammar that a job accepted, within limits on time, memory and stack, is compiled again
in the engine's process, within wider limits.
"""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.errors import RequestError
from quire.core.lru import LruCache
from quire.serving.answer_grammar import AnswerGrammar, GrammarRequest
from quire.serving.job_messages import TOO_COSTLY, Asker, JobLimits
from quire.serving.jobs import Jobs
from quire.serving.model_files import Stamp, check_unchanged

if TYPE_CHECKING:
    from quire.serving.grammar_builder import GrammarBuilder

STACK_BYTES = 4 << 20
"""Thread stack size: a quarter of the engine's for the same work; see `engine.grammar_queue`."""
_LIMITS = JobLimits(at_once=2, cpu_s=3, wall_s=60.0, memory=1 << 30)
_KEPT_CHARACTERS = 16 << 20
"""Most characters of all cached grammars together."""


@dataclass(frozen=True, slots=True)
class BuilderOpening:
    """Makes the builder that jobs share, in their process; see `Jobs`.

    Attributes:
        stamp: stamp of the model's files when the server read them; None skips the comparison.
    """

    folder: Path
    dialect: str
    vocab_size: int
    stamp: Stamp | None = None

    def __call__(self, ask: Asker) -> GrammarBuilder:
        # Here, since the HTTP side never loads the compiler.
        from quire.serving.grammar_builder import GrammarBuilder

        check_unchanged(self.folder, self.stamp)
        return GrammarBuilder(self.folder, self.dialect, self.vocab_size)


class GrammarSandbox:
    """Makes the grammars of one model. Its process starts at first use.

    Args:
        opening: makes the builder.
    """

    def __init__(self, opening: BuilderOpening) -> None:
        self._jobs = Jobs(opening, _LIMITS)
        self._kept: LruCache[bytes, AnswerGrammar] = LruCache(_KEPT_CHARACTERS, _characters)

    async def build(self, request: GrammarRequest, caller: str = "") -> AnswerGrammar:
        """Return the grammar of an answer. Cancelling the caller ends the compilation.

        Args:
            caller: the API key of the request; keys take turns.

        Raises:
            RequestError: it cannot be compiled, or not within the limits.
            EngineFailure: the process cannot be started.
        """
        field = request.field
        try:
            key = blake2b(pickle.dumps(request), digest_size=16).digest()
            if (kept := self._kept.get(key)) is not None:
                return kept
            return self._kept.put(key, await self._jobs.run(_build, request, key=caller))
        except RecursionError:
            raise _refused(field, "it is nested too deeply") from None
        except RequestError as error:
            if error.code != TOO_COSTLY:
                raise
            raise _refused(
                field,
                f"it takes more than {_LIMITS.cpu_s} s of processor time, or exceeds the "
                "compiler's memory or stack",
            ) from error

    async def close(self) -> None:
        """End the process. May be called again."""
        await self._jobs.close()


def _characters(built: AnswerGrammar) -> int:
    """Return the size of a cache entry. An entry without a grammar counts as well."""
    texts = (built.grammar.source, built.grammar.started) if built.grammar else ()
    return 64 + sum(map(len, (*texts, *built.unenforced)))


def _refused(field: str, why: str) -> RequestError:
    return RequestError(f"'{field}' cannot be compiled: {why}.", param=field, code="invalid_schema")


async def _build(builder: GrammarBuilder, request: GrammarRequest) -> AnswerGrammar:
    """Build a grammar in a job, in a thread with a small stack."""
    outcome: list[AnswerGrammar | Exception] = []

    def work() -> None:
        try:
            outcome.append(builder.build(request))
        except RecursionError:
            outcome.append(
                RequestError(
                    "A schema is nested too deeply: use fewer levels.", code="invalid_schema"
                )
            )
        except Exception as error:  # the waiting thread raises it: an error ends only its own
            outcome.append(error)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    found = outcome[0]
    if isinstance(found, Exception):
        raise found
    return found

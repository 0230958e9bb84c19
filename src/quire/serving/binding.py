"""What holds an answer to a schema or to tool calls, and the grammar that comes of it.

Runs in a process of its own, see `serving.sandbox`: schemas are the client's, and a grammar may
cost its compiler any time, memory or stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.constraints.grammar import GrammarCompiler, check_grammar, compiles_as_pattern
from quire.constraints.masks import first_of
from quire.constraints.schemas import prepare
from quire.core.errors import RequestError
from quire.core.request import GrammarSpec
from quire.serving.bounds import Bound, Wanted
from quire.serving.formats import answer_grammar, body_rule
from quire.text.dialects import DIALECTS
from quire.text.dialects.base import Dialect, Tool, vocabulary_of
from quire.text.tokenizer import Tokenizer

MAX_SOURCE = 4 << 20
"""Characters of a grammar."""
_REHEARSED = 8
_MANY = re.compile(r"\{\d*,?\d{3}")
"""A repetition of hundreds: a pattern with such may be too large, which its first letters show."""


class Binder:
    """Makes grammars for one model.

    Args:
        folder: the model's, for its tokenizer.
        dialect: its name in the registry.
        vocab_size: of the model's logits.
    """

    def __init__(self, folder: Path, dialect: str, vocab_size: int) -> None:
        tokenizer = Tokenizer.open(folder)
        self._dialect: Dialect = DIALECTS[dialect]
        self._vocabulary = vocabulary_of(tokenizer)
        self._compiler = GrammarCompiler(
            folder / "tokenizer.json", vocab_size, tokenizer.eos_ids, kept=0
        )

    def bind(self, wanted: Wanted) -> Bound:
        """The grammar, which has been compiled once.

        A schema binds the answer, and leaves the model free to call a tool instead.

        Raises:
            RequestError: a schema that cannot be compiled, or a call that cannot be forced.
        """
        wanted, unenforced = self._prepared(wanted)
        lost = dict.fromkeys(unenforced)
        grammar = self._grammar(wanted, lambda each: lost.setdefault(each))
        if grammar is not None:
            field = wanted.field
            if len(grammar.source) > MAX_SOURCE:
                raise RequestError(
                    f"'{field}' makes a grammar of more than {MAX_SOURCE:,} characters.",
                    param=field,
                    code="invalid_schema",
                )
            self._rehearse(grammar, field)
        return Bound(grammar, tuple(lost))

    def _rehearse(self, grammar: GrammarSpec, field: str) -> None:
        """Compiles a grammar and takes its first tokens: some outgrow their limits only then."""
        state = self._compiler.compile(grammar, field)
        try:
            for _ in range(_REHEARSED):
                mask = state.mask()
                token = grammar.opener if mask is None else first_of(mask)
                if token is None or state.finished:
                    return
                state.accept(token)
        except RequestError as error:
            reason = f"'{field}' cannot be compiled: {error.message}"
            raise RequestError(reason, param=field, code="invalid_schema") from error

    def _prepared(self, wanted: Wanted) -> tuple[Wanted, tuple[str, ...]]:
        """The same with schemas that can be compiled, and what they lost."""
        lazy = wanted.format is None and not wanted.forced
        tools, unenforced = list(wanted.tools), []
        for index, tool in enumerate(wanted.tools):
            if lazy and tool.name not in wanted.strict:
                tools[index] = Tool(tool.name)
            elif not wanted.forced or wanted.name in ("", tool.name):
                parameters, lost = self._schema(
                    _of_object(tool.parameters, f"tools[{index}].{wanted.parameters_field}"),
                    f"tools[{index}].{wanted.parameters_field}",
                )
                tools[index] = Tool(tool.name, parameters)
                unenforced += [f"{tool.name}: {each}" for each in lost]
        format = wanted.format
        if format is not None and format.kind == "json_schema":
            prepared, lost = self._schema(_read(format.source, format.field), format.field)
            format = replace(format, source=json.dumps(prepared))
            unenforced += lost
        return replace(wanted, format=format, tools=tuple(tools)), tuple(unenforced)

    def _schema(self, schema: Any, field: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        def compiles(pattern: str) -> bool:
            text = json.dumps({"type": "string", "pattern": pattern})
            known = compiles_as_pattern(pattern)
            if known and _MANY.search(pattern):
                self._rehearse(GrammarSpec("json_schema", text), field)
            return known

        prepared = prepare(schema, field, compiles)
        check_grammar(GrammarSpec("json_schema", json.dumps(prepared.schema)), field)
        return prepared.schema, prepared.unenforced

    def _grammar(self, wanted: Wanted, lose: Callable[[str], None]) -> GrammarSpec | None:
        opener = self._dialect.opener(self._vocabulary)
        if wanted.forced:
            return GrammarSpec("lark", self._calls(wanted, lose), opener=opener)
        if wanted.format is None:
            return self._strict_calls(wanted, opener, lose)
        frame = None if wanted.bare else self._dialect.frame
        if not wanted.tools and frame is None:
            return answer_grammar(wanted.format)
        before = "" if frame is None else frame.before(self._vocabulary)
        rule = f"answer: {before} body\n{body_rule(wanted.format)}\n"
        if not wanted.tools:
            return GrammarSpec("lark", f"start: answer\n{rule}")
        if self._dialect.forced is None:
            raise RequestError(
                f"'{wanted.field}' is not offered beside 'tools': no grammar holds this "
                "model's tool calls.",
                param=wanted.field,
                code="unsupported_parameter",
            )
        calls = re.sub(r"^start:", "calls:", self._calls(wanted, lose), count=1, flags=re.MULTILINE)
        return GrammarSpec("lark", f"start: answer | calls\n{rule}{calls}", opener=opener)

    def _strict_calls(
        self, wanted: Wanted, opener: int | None, lose: Callable[[str], None]
    ) -> GrammarSpec | None:
        """What binds the calls of strict tools, and leaves all else free."""
        source = None
        if any(tool.name in wanted.strict for tool in wanted.tools):
            source = self._dialect.strict_grammar(wanted.tools, self._vocabulary, lose)
        if source is None:
            return None
        return GrammarSpec("lark", source, opener=opener, lazy=opener is not None)

    def _calls(self, wanted: Wanted, lose: Callable[[str], None]) -> str:
        """Lark source of nothing but tool calls."""
        return self._dialect.tool_grammar(
            wanted.tools, wanted.name or None, wanted.parallel, self._vocabulary, lose
        )


def _read(schema: str, field: str) -> Any:
    try:
        return json.loads(schema)
    except ValueError as error:
        raise RequestError(
            f"'{field}' is no JSON: {error}.", param=field, code="invalid_schema"
        ) from error


def _of_object(parameters: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A tool's schema; one without a type is an object's all the same."""
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"'{field}' must be of type 'object'.", param=field, code="invalid_schema"
        )
    return {"type": "object", **parameters}

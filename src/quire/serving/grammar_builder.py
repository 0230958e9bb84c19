"""Builds the grammar that enforces a schema, a format or tool calls.

It runs in a process of its own (see `serving.sandbox`): schemas come from clients, and compiling a
grammar may take any time, memory or stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.constraints.grammar import GrammarCompiler, check_grammar, compiles_as_pattern
from quire.constraints.masks import first_of
from quire.constraints.schema_numbers import holdable
from quire.constraints.schemas import prepare
from quire.core.errors import RequestError
from quire.core.request import GrammarSpec
from quire.serving.answer_grammar import AnswerGrammar, GrammarRequest
from quire.serving.formats import body_rule, format_grammar
from quire.text.dialects import DIALECTS
from quire.text.dialects.base import Dialect, Tool, vocabulary_of
from quire.text.tokenizer import Tokenizer

MAX_SOURCE = 4 << 20
"""Most characters of a grammar."""
_REHEARSED = 8
_TOLD = 8
"""Most keywords that a refusal names."""
_BLANKS = " \t\n\r"
_IN_JSON = re.compile(rf'(?P<string>"(?:[^"\\]|\\.?)*+"?)|[{_BLANKS}]+', re.DOTALL)
"""Matches strings, of which the last may be open, and the text between JSON's parts."""
_MANY = re.compile(r"\{\d*,?\d{3}")
"""Matches a repetition of hundreds. Only patterns with one need their size checked."""


class GrammarBuilder:
    """Makes grammars for one model.

    Args:
        folder: the model's folder, for its tokenizer.
        dialect: the dialect's name in the registry.
        vocab_size: number of the model's logits.
    """

    def __init__(self, folder: Path, dialect: str, vocab_size: int) -> None:
        tokenizer = Tokenizer.open(folder)
        self._dialect: Dialect = DIALECTS[dialect]
        self._vocabulary = vocabulary_of(tokenizer)
        self._compiler = GrammarCompiler(
            folder / "tokenizer.json", vocab_size, tokenizer.eos_ids, kept=0
        )

    def build(self, request: GrammarRequest) -> AnswerGrammar:
        """Return the grammar after compiling it once.

        A schema constrains the answer, but leaves the model free to call a tool instead.

        Raises:
            RequestError: a schema that cannot be compiled, or a call that cannot be forced.
        """
        request, unenforced = self._prepared(request)
        lost = dict.fromkeys(unenforced)
        grammar = self._grammar(request, lambda each: lost.setdefault(each))
        if grammar is not None:
            schema = request.format is None or request.format.kind == "json_schema"
            grammar = replace(grammar, started=_started(request), schema=schema)
            field = request.field
            if len(grammar.source) > MAX_SOURCE:
                raise RequestError(
                    f"'{field}' becomes a grammar of more than {MAX_SOURCE:,} characters.",
                    param=field,
                    code="invalid_schema",
                )
            self._rehearse(grammar, field)
        return AnswerGrammar(grammar, tuple(lost))

    def _rehearse(self, grammar: GrammarSpec, field: str) -> None:
        """Compile a grammar and feed it its first tokens: some exceed their limits only then."""
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

    def _prepared(self, request: GrammarRequest) -> tuple[GrammarRequest, tuple[str, ...]]:
        """Return the request with schemas that can be compiled, and the schema parts left out."""
        lazy = request.format is None and not request.forced
        tools, unenforced = list(request.tools), []
        for index, tool in enumerate(request.tools):
            if lazy and tool.name not in request.strict:
                tools[index] = Tool(tool.name)
            elif not request.forced or request.name in ("", tool.name):
                parameters, lost = self._schema(
                    _of_object(tool.parameters, f"tools[{index}].{request.parameters_field}"),
                    f"tools[{index}].{request.parameters_field}",
                )
                if lost and tool.name in request.strict:
                    raise _not_strict(f"tools[{index}].{request.parameters_field}", lost)
                tools[index] = Tool(tool.name, parameters)
                unenforced += [f"{tool.name}: {each}" for each in lost]
        format = request.format
        if format is not None and format.kind == "json_schema":
            prepared, lost = self._schema(
                _read(format.source, format.field), format.field, close=True
            )
            if lost and format.strict:
                raise _not_strict(format.field, lost)
            format = replace(format, source=json.dumps(prepared))
            unenforced += lost
        return replace(request, format=format, tools=tuple(tools)), tuple(unenforced)

    def _schema(
        self, schema: Any, field: str, *, close: bool = False
    ) -> tuple[dict[str, object], tuple[str, ...]]:
        def is_pattern(pattern: str) -> bool:
            text = json.dumps({"type": "string", "pattern": pattern})
            known = compiles_as_pattern(pattern)
            if known and _MANY.search(pattern):
                self._rehearse(GrammarSpec("json_schema", text), field)
            return known

        def compiles(part: dict[str, object]) -> bool:
            try:
                source = json.dumps(holdable(part, field))
                check_grammar(GrammarSpec("json_schema", source), field)
            except RequestError:
                return False
            return True

        prepared = prepare(schema, field, is_pattern, compiles=compiles, close=close)
        prepared = replace(prepared, schema=holdable(prepared.schema, field))
        check_grammar(GrammarSpec("json_schema", json.dumps(prepared.schema)), field)
        return prepared.schema, prepared.unenforced

    def _grammar(
        self, request: GrammarRequest, on_unenforced: Callable[[str], None]
    ) -> GrammarSpec | None:
        opener = self._dialect.opener(self._vocabulary)
        if request.forced:
            return GrammarSpec("lark", self._calls(request, on_unenforced), opener=opener)
        if request.format is None:
            return self._strict_calls(request, opener, on_unenforced)
        frame = None if request.bare else self._dialect.frame
        if not request.tools and frame is None:
            return format_grammar(request.format)
        before = "" if frame is None else frame.before(self._vocabulary)
        rule = f"answer: {before} body\n{body_rule(request.format)}\n"
        if not request.tools:
            return GrammarSpec("lark", f"start: answer\n{rule}")
        if self._dialect.forced is None:
            raise RequestError(
                f"'{request.field}' is not supported with 'tools': this model's tool calls "
                "cannot be part of a grammar.",
                param=request.field,
                code="unsupported_parameter",
            )
        calls = re.sub(
            r"^start:", "calls:", self._calls(request, on_unenforced), count=1, flags=re.MULTILINE
        )
        return GrammarSpec("lark", f"start: answer | calls\n{rule}{calls}", opener=opener)

    def _strict_calls(
        self, request: GrammarRequest, opener: int | None, on_unenforced: Callable[[str], None]
    ) -> GrammarSpec | None:
        """Return a grammar that constrains calls of strict tools and leaves other text free."""
        source = None
        if any(tool.name in request.strict for tool in request.tools):
            source = self._dialect.strict_grammar(request.tools, self._vocabulary, on_unenforced)
        if source is None:
            return None
        return GrammarSpec("lark", source, opener=opener, lazy=opener is not None)

    def _calls(self, request: GrammarRequest, on_unenforced: Callable[[str], None]) -> str:
        """Return Lark source that allows only tool calls."""
        return self._dialect.tool_grammar(
            request.tools,
            request.name or None,
            request.parallel,
            vocabulary=self._vocabulary,
            on_unenforced=on_unenforced,
        )


def _not_strict(field: str, lost: Sequence[str]) -> RequestError:
    """Return the refusal of a strict schema that the grammar cannot enforce in full."""
    return RequestError(
        f"'{field}' is strict, but no grammar can enforce all of it: {'; '.join(lost[:_TOLD])}. "
        "Leave these keywords out, or 'strict'.",
        param=field,
        code="invalid_schema",
    )


def _started(request: GrammarRequest) -> str:
    """Return the given start in the form that the grammar accepts: JSON with few blanks."""
    if request.format is None or request.format.kind != "json_schema":
        return request.started
    return _IN_JSON.sub(lambda found: found["string"] or " ", request.started.lstrip(_BLANKS))


def _read(schema: str, field: str) -> Any:
    try:
        return json.loads(schema)
    except ValueError as error:
        raise RequestError(
            f"'{field}' is not valid JSON: {error}.", param=field, code="invalid_schema"
        ) from error


def _of_object(parameters: Mapping[str, object], field: str) -> dict[str, object]:
    """Return a tool's schema, with type object if it has none."""
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"'{field}' must be of type 'object'.", param=field, code="invalid_schema"
        )
    return {"type": "object", **parameters}

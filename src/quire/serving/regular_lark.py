"""Lark grammars without recursion, as regular expressions.

Clients describe a custom tool's text by a grammar. The text stands within JSON in a call, where a
regular expression can be enforced (a string's `pattern`) and a grammar cannot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_MOST = 1 << 16
"""Characters of an expression that is still worth compiling."""
_DEEPEST = 64
"""Rules and groups that may be within each other; six calls of Python each."""
_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*)
    |(?P<import>%import\s+common\.(?P<imported>\w+)(?:\s*->\s*(?P<renamed>\w+))?)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<name>[?!]?[A-Za-z_]\w*)
    |(?P<number>\d+)
    |(?P<mark>->|\.\.|[|()\[\]?*+:~.,])""",
    re.VERBOSE,
)
_COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LETTER": "[A-Za-z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
"""Terminals of Lark's `common` that grammars import."""


class NotRegular(ValueError):
    """The grammar is recursive, or has a part that is not understood; the message says which."""


@dataclass
class _Grammar:
    """A grammar while its rules are put into each other."""

    rules: dict[str, Sequence[str]] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)
    depth: int = 0

    def expression(self, name: str) -> str:
        """Return the expression of a rule or terminal."""
        if name in self.known:
            return self.known[name]
        if name in self.active:
            raise NotRegular(f"'{name}' is recursive")
        if name not in self.rules:
            raise NotRegular(f"'{name}' is not defined")
        self.active.append(name)
        found = _Parser(self, self.rules[name]).whole()
        self.active.pop()
        if len(found) > _MOST:
            raise NotRegular(f"'{name}' becomes too long")
        self.known[name] = found
        return found


class _Parser:
    """Reads the right side of a rule."""

    def __init__(self, grammar: _Grammar, tokens: Sequence[str]) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._at = 0
        self._length = 0

    def whole(self) -> str:
        found = self._alternatives()
        if self._next():
            raise NotRegular(f"{self._next()!r} is not understood")
        return found

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str = "") -> str:
        token = self._next()
        if wanted and token != wanted:
            raise NotRegular(f"{wanted!r} is missing")
        self._at += 1
        return token

    def _alternatives(self) -> str:
        self._grammar.depth += 1
        if self._grammar.depth > _DEEPEST:
            raise NotRegular("it is nested too deeply")
        found = [self._sequence()]
        while self._next() == "|":
            self._take()
            found.append(self._sequence())
        self._grammar.depth -= 1
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"

    def _sequence(self) -> str:
        found: list[str] = []
        while self._next() not in ("", "|", ")", "]"):
            if self._next() == "->":  # a name for the tree
                self._take()
                self._take()
            else:
                found.append(self._repeated())
        return "".join(found)

    def _repeated(self) -> str:
        atom, mark = self._atom(), self._next()
        if mark in ("?", "*", "+"):
            return f"(?:{atom}){self._take()}"
        if mark == "~":
            self._take()
            least = most = self._take()
            if self._next() == "..":
                self._take()
                most = self._take()
            return f"(?:{atom}){{{least},{most}}}"
        return atom

    def _atom(self) -> str:
        token = self._take()
        if token in ("(", "["):
            found = self._alternatives()
            self._take(")" if token == "(" else "]")
            return f"(?:{found})" if token == "(" else f"(?:{found})?"
        found = self._leaf(token)
        self._length += len(found)
        if self._length > _MOST:  # ahead of joining, which a short grammar could make endless
            raise NotRegular("it becomes too long")
        return found

    def _leaf(self, token: str) -> str:
        """Return the expression of a string, a range, an expression or a name."""
        if token.startswith('"'):
            if self._next() == "..":
                self._take()
                last = self._take()
                if not last.startswith('"'):
                    raise NotRegular(f"{last!r} is not understood")
                return f"[{_literal(token)}-{_literal(last)}]"
            return f"(?i:{_literal(token)})" if token.endswith("i") else _literal(token)
        if token.startswith("/"):
            body, _, flags = token[1:].rpartition("/")
            plain = body.replace(r"\/", "/")
            return f"(?{flags}:{plain})" if flags else f"(?:{plain})"
        if token[:1].isalpha() or token[:1] == "_":
            return self._grammar.expression(token)
        raise NotRegular(f"{token!r} is not understood")


def regular(source: str) -> str:
    """Return a regular expression for the texts of a Lark grammar, from its rule `start`.

    Raises:
        NotRegular: the grammar is recursive, or has a part that is not understood.
    """
    grammar = _Grammar()
    tokens = _tokens(source, grammar)
    starts = [at for at, token in enumerate(tokens) if token == ":" and at]
    heads = [_head(tokens, at) for at in starts]
    if not heads or heads[0] > 0:
        raise NotRegular("it does not begin with a rule")
    for at, (head, end) in zip(starts, pairwise([*heads, len(tokens)]), strict=True):
        name = tokens[head].lstrip("?!")
        if name in grammar.rules:
            raise NotRegular(f"'{name}' is defined twice")
        grammar.rules[name] = tokens[at + 1 : end]
    return grammar.expression("start")


def _head(tokens: Sequence[str], colon: int) -> int:
    """Return where the name before a colon stands; a priority may follow it."""
    return colon - 3 if colon >= 3 and tokens[colon - 2] == "." else colon - 1


def _tokens(source: str, grammar: _Grammar) -> list[str]:
    tokens: list[str] = []
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise NotRegular(f"{source[at : at + 20]!r} is not understood")
        at = found.end()
        if found["import"]:
            name = found["imported"]
            if name not in _COMMON:
                raise NotRegular(f"common.{name} is not known")
            grammar.known[found["renamed"] or name] = _COMMON[name]
        elif not found["skip"]:
            tokens.append(found[0])
    return tokens


def _literal(token: str) -> str:
    """Return the expression of a string in quotes."""
    text = token[1 : token.rindex('"')]
    plain = re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[1]), text)
    return "".join(_QUOTED.get(each, each) for each in plain)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_QUOTED = {each: f"\\{each}" for each in r".+*?()|[]{}^$\-"} | {
    "\n": r"\n",
    "\t": r"\t",
    "\r": r"\r",
}

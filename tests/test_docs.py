"""Files, tests, routes and fields that the documents name exist."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

import quire
from quire.api.chat.endpoint import ChatRequest
from quire.api.completions.endpoint import CompletionRequest
from quire.api.messages.schema import MessagesRequest
from quire.api.responses.schema import ResponsesRequest
from quire.api.routes import OPERATIONS
from quire.api.shared.foreign import ALIASES
from quire.api.shared.schema import DecodingFields, Wire
from quire.cli.commands import COMMANDS, build_parser

ROOT = Path(__file__).parent.parent
FOLDERS = (".", "benchmarks", "contrib", "docs", "src/quire/demo/model", "training")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
CODE = re.compile(r"`([^`]+)`")
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
API = FENCED.sub("", (ROOT / "docs" / "api.md").read_text())
SHOWN = re.compile(r"(?:[A-Z_]+=\S+ )*quire (.+?)(?:\s(?:[|<>&#]|&&)\s.*)?$")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """Return the names by which GitHub links to headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        place, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = document.parent / place if place else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tests_that_it_names_are_there(document: Path) -> None:
    for path in re.findall(r"`(tests/[\w/]+\.py)", document.read_text()):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("document", ["ARCHITECTURE", "CONTRIBUTING"])
def test_the_files_that_it_names_are_there(document: str) -> None:
    places = (ROOT, ROOT / "src" / "quire")
    for path in re.findall(r"`(\w+/[\w/]+\.\w+)`", (ROOT / f"{document}.md").read_text()):
        assert any((place / path).is_file() for place in places), path


def test_the_names_that_recipes_point_to_are_in_their_files() -> None:
    rows = re.findall(r"^\| `(\S+)`: (`[^|]+) \|", CONTRIBUTING, re.MULTILINE)
    inside = re.findall(r"`(\w+)`\)? (?:in|of) `(\S+\.py)`", CONTRIBUTING)
    named = [(path, name) for path, names in rows for name in re.findall(r"`(\w+)`", names)]
    named += [(path, name) for name, path in inside]
    assert len(named) > 20
    for path, name in named:
        file = ROOT / path if path.startswith("tests/") else ROOT / "src" / "quire" / path
        assert re.search(rf"\b{name}\b", file.read_text()), (path, name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_that_it_shows_exist(document: Path) -> None:
    parser, _ = build_parser(COMMANDS)
    text = document.read_text().replace("\\\n", " ")
    for line in "\n".join(FENCED.findall(text)).splitlines():
        if command := SHOWN.match(line.strip()):
            ours = itertools.takewhile(lambda each: each != "--", shlex.split(command[1]))
            _, unknown = parser.parse_known_args(list(ours))  # exits where one does not exist
            assert not unknown, line


def test_every_route_is_documented() -> None:
    rows = [line for line in API.splitlines() if line.startswith("| `")]
    for operation in OPERATIONS:
        path = re.escape(operation.template)
        named = rf"\b{operation.method.upper()}\b[^|]*{path}(?=[`,])"
        assert any(re.search(named, row) for row in rows), operation.template


@pytest.mark.parametrize(
    ("schema", "official"),
    [(ChatRequest, ChatParams), (CompletionRequest, TextParams)],
)
def test_every_field_beyond_the_official_ones_is_documented(
    schema: type[Wire], official: type
) -> None:
    named = set(CODE.findall(API))
    # Fields that take nothing are there to say what to send instead.
    fields = schema.model_fields.items()
    taken = {name for name, field in fields if field.annotation is not type(None)}
    own = taken - set(official.__annotations__) - {"stream"}
    assert own - named == set()


@pytest.mark.parametrize(
    ("schema", "official"),
    [(ResponsesRequest, ResponseCreateParamsBase), (MessagesRequest, MessageCreateParamsBase)],
)
def test_fields_of_sampling_are_documented_for_every_protocol(
    schema: type[Wire], official: type
) -> None:
    shared = set(schema.model_fields) & set(DecodingFields.model_fields)
    assert shared - set(official.__annotations__) - set(CODE.findall(API)) == set()


def test_other_names_of_fields_are_documented() -> None:
    others = {other for each in ALIASES.values() for other in each}
    assert others - set(CODE.findall(API)) == set()


def test_the_changelog_has_the_version_of_the_package() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    newest, last, *_ = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert newest == "Unreleased"
    version, _, date = last.partition(" - ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version == project["version"] == quire.__version__
    formula = (ROOT / "contrib" / "homebrew" / "quire-serve.rb").read_text()
    assert f"quire_serve-{version}.tar.gz" in formula
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        found = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert found == [kind for kind in kinds if kind in found]


@pytest.mark.parametrize("page", ["proxy", "troubleshooting"])
def test_the_messages_that_it_explains_are_said(page: str) -> None:
    code = "".join(path.read_text() for path in (ROOT / "src" / "quire").rglob("*.py"))
    said = re.sub(r'"\s+f?"', "", code)  # a text of several lines
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
    messages = [text for row in rows for text in CODE.findall(row) if " " in text]
    assert messages
    for message in messages:
        for part in re.split(r"'?(?:NAME|URL|127\.0\.0\.1:8000: .*)'?", message):
            assert part in said, message

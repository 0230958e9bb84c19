"""`quire search`: lists short names, and searches the hub."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from rich.console import Console

from quire.cli.fitting import FittingTable
from quire.cli.settings import Command, TableOptions
from quire.cli.short_names import short_names
from quire.cli.values import Count, Flag
from quire.core.errors import QuireError

_REACHED_WITHIN_S = 5.0

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True, slots=True)
class Match:
    """A model found by a search.

    Attributes:
        name: argument of `quire run`.
        place: the repository.
        downloads: downloads in the last month; None if the hub was not asked.
    """

    name: str
    place: str
    downloads: int | None = None


class SearchCommand(TableOptions, Command):
    """Lists short names. With words, also lists the hub's models whose names contain all of them,
    most downloads first. quire run and quire serve take short names and hub ids.
    """

    command: ClassVar[str] = "search"
    summary: ClassVar[str] = "find models on the hub, and list short names"

    words: Annotated[tuple[str, ...], Flag("WORD", positional=True, several=True)] = Field(
        (), description="part of a model's name; all words must occur in it"
    )
    limit: Annotated[Count, Flag("N")] = Field(
        20, description="maximum number of models from the hub"
    )

    def run(self) -> int:
        """Print the matches; return 1 if there are none.

        Raises:
            QuireError: no short name matches, and the hub cannot be reached or refuses.
        """
        words = [word.lower() for word in self.words]
        matches = [
            Match(name, place)
            for name, place in short_names().items()
            if all(word in f"{name} {place}".lower() for word in words)
        ]
        if words:
            try:
                matches += _on_hub(" ".join(self.words), self.limit)
            except QuireError as error:
                if not matches:
                    raise
                print(f"quire search: {error}", file=sys.stderr)
        if self.as_json:
            print(json.dumps([asdict(match) for match in matches], indent=2))
        elif matches:
            Console().print(_table(matches))
        else:
            print("nothing found")
        return 0 if matches else 1


def hub_api() -> HfApi:
    """Return a client of the hub that HF_ENDPOINT names, or of Hugging Face's."""
    from huggingface_hub import HfApi

    return HfApi()


def _on_hub(words: str, limit: int) -> list[Match]:
    """Return the hub's models in readable formats: safetensors or GGUF."""
    from huggingface_hub import get_session
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        api = hub_api()
        get_session().head(api.endpoint, timeout=_REACHED_WITHIN_S)  # a search retries for 25 s
        found = [
            model
            for library in ("safetensors", "gguf")
            for model in api.list_models(
                search=words, filter=library, sort="downloads", limit=limit
            )
        ]
    except OfflineModeIsEnabled as error:
        raise QuireError(
            "HF_HUB_OFFLINE is set, so the hub is not searched: unset it, or list local "
            "models with `quire models`"
        ) from error
    except HfHubHTTPError as error:
        raise QuireError(f"the hub refused the search: {error}") from error
    except Exception as error:  # huggingface_hub raises errors of requests or of httpx
        raise QuireError(
            f"the hub cannot be reached ({error}): only short names are known"
        ) from error
    unique = {model.id: model.downloads or 0 for model in found}
    most = sorted(unique.items(), key=lambda each: -each[1])[:limit]
    return [Match(name, name, downloads) for name, downloads in most]


def _table(matches: list[Match]) -> FittingTable:
    rows = [
        (
            match.name,
            match.place if match.place != match.name else "",
            "" if match.downloads is None else f"{match.downloads:,}",
        )
        for match in matches
    ]
    return FittingTable(("name", "repository", "downloads"), rows, texts=2)

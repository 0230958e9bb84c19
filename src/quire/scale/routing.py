"""What a router knows of a call to a replica. Pure Python; knows no Ray."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    """First argument of each call to a replica: where the router sends it.

    Attributes:
        replica: the replica that has to get the call; empty leaves the choice to the router.
    """

    replica: str = ""

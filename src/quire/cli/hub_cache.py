"""`quire pull` and `quire rm`: models of the hub on this disk."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace

from quire.cli.models import shortened
from quire.core.errors import QuireError


def add_pull_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares `pull`."""
    parser = subparsers.add_parser(
        "pull",
        help="download models from the hub",
        description="Downloads what Quire needs of models into the Hugging Face cache; what was "
        "broken off goes on where it stopped. A private model needs HF_TOKEN. Of a repository with "
        "several GGUF models, :FILE.gguf or a word of its name such as :Q4_K_M says which.",
    )
    parser.add_argument("names", nargs="+", metavar="OWNER/NAME[:FILE.gguf]")


def pull(args: argparse.Namespace) -> int:
    """Downloads each, and says where it lies.

    Raises:
        QuireError: one cannot be had.
    """
    from quire.models.hub import find_folder

    for name in args.names:
        print(f"{name}: {find_folder(name)}")
    return 0


def add_rm_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares `rm`."""
    parser = subparsers.add_parser(
        "rm",
        help="delete models from the hub's cache on this disk",
        description="Deletes models from the Hugging Face cache. Folders are never deleted.",
    )
    parser.add_argument("names", nargs="+", metavar="OWNER/NAME")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def rm(args: argparse.Namespace) -> int:
    """Deletes each after a question; 1 if the answer was no.

    Raises:
        QuireError: one is not there; nothing is deleted then.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound as error:
        raise QuireError("there is no Hugging Face cache on this disk") from error
    there = {each.repo_id: each for each in cache.repos if each.repo_type == "model"}
    for name in args.names:
        if name not in there:
            raise QuireError(f"{name!r} is not in the Hugging Face cache; see quire models")
    chosen = [there[name] for name in args.names]
    size = shortened(sum(each.size_on_disk for each in chosen))
    if not args.yes and not _sure(f"Delete {', '.join(args.names)} ({size})?"):
        return 1
    revisions = [revision.commit_hash for each in chosen for revision in each.revisions]
    cache.delete_revisions(*revisions).execute()
    print(f"deleted {size}")
    return 0


def _sure(question: str) -> bool:
    """Raises `QuireError` where nobody can answer."""
    if not sys.stdin.isatty():
        raise QuireError("rm asks before it deletes; say --yes where there is no terminal")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


PULL = SimpleNamespace(add_parser=add_pull_parser, run=pull)
RM = SimpleNamespace(add_parser=add_rm_parser, run=rm)

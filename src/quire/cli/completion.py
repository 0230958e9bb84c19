"""`quire completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import argparse

import shtab

_SHELLS = ("bash", "zsh", "fish")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "completion",
        help="print a shell's completion script",
        description="Prints a script that completes commands and options. bash: eval it in "
        "~/.bashrc; zsh: write it to _quire in a folder of $fpath; fish: write it to "
        "~/.config/fish/completions/quire.fish.",
    )
    parser.add_argument("shell", choices=_SHELLS)


def run(args: argparse.Namespace) -> int:
    """Prints the script of `args.parser`, the whole command line."""
    print(shtab.complete(args.parser, shell=args.shell))
    return 0

"""`quire completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from quire.cli.settings import Command
from quire.cli.values import Flag


class CompletionCommand(Command):
    """Prints a script that completes commands and options. bash: eval it in ~/.bashrc; zsh: write
    it to _quire in a folder of $fpath; fish: write it to ~/.config/fish/completions/quire.fish.
    """

    command: ClassVar[str] = "completion"
    summary: ClassVar[str] = "print a shell's completion script"

    shell: Annotated[Literal["bash", "zsh", "fish"], Flag(positional=True)]

    def run(self) -> int:
        """Prints the script."""
        # Here, because `commands` imports this module; `shtab`, because no other command needs it.
        import shtab

        from quire.cli.commands import COMMANDS
        from quire.cli.flags import build_parser

        print(shtab.complete(build_parser(COMMANDS)[0], shell=self.shell))
        return 0

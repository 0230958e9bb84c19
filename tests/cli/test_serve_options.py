"""What `quire serve` makes of its options for thoughts and stored answers."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from quire.cli.serve import add_parser, server_config
from quire.config import ServerConfig
from quire.errors import QuireError


def config(*options: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return server_config(parser.parse_args(["serve", *options]))


def test_by_default_the_key_is_the_process_own() -> None:
    assert config().signing_key is None
    assert config().stored_responses == ServerConfig().stored_responses


def test_a_signing_key_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert config("--signing-key-file", str(file)).signing_key == "secret"
    assert config("--stored-responses", "5").stored_responses == 5


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="--signing-key-file"):
        config("--signing-key-file", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(QuireError, match="empty"):
        config("--signing-key-file", str(tmp_path / "empty"))

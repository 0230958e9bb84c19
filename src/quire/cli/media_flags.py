"""The flags that bound the media and documents of requests, and say where they come from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quire.cli.values import byte_count, duration, positive
from quire.core.config import ServerConfig
from quire.core.errors import QuireError

_BYTES = {
    "max_image_bytes": "20MiB",
    "max_audio_bytes": "20MiB",
    "max_video_bytes": "100MiB",
    "max_document_bytes": "32MiB",
}
_HELP = {
    "max_images": "of one request, earlier messages included; default: %(default)s",
    "max_image_bytes": "of one image's file; default: %(default)s",
    "max_image_pixels": "width times height of one image; default: %(default)s",
    "max_audios": "sounds of one request, earlier messages included; default: %(default)s",
    "max_audio_bytes": "of one sound's file; default: %(default)s",
    "max_audio_seconds": "of one sound; default: %(default)g, or less where the model hears less",
    "max_videos": "of one request, earlier messages included; default: %(default)s",
    "max_video_bytes": "of one video's file; default: %(default)s",
    "max_video_pixels": "width times height of one video's frames; default: %(default)s",
    "max_video_seconds": "of one video; default: %(default)g",
    "max_video_frames": "of one video that are shown to the model; default: %(default)s",
    "max_documents": "of one request, earlier messages included; default: %(default)s",
    "max_document_bytes": "of one document's file; default: %(default)s",
    "max_document_pages": "of one document; default: %(default)s",
}


def add_media_arguments(group: argparse._ArgumentGroup) -> None:
    """Declares `--max-images` and its like, and `--media-folder` and its like."""
    add, defaults = group.add_argument, ServerConfig()
    for name, told in _HELP.items():
        option = f"--{name.replace('_', '-')}"
        if name in _BYTES:
            add(option, type=byte_count, default=_BYTES[name], metavar="BYTES", help=told)
        elif name.endswith("seconds"):
            default = getattr(defaults, name)
            add(option, type=duration, default=default, metavar="SECONDS", help=told)
        else:
            add(option, type=positive, default=getattr(defaults, name), metavar="N", help=told)
    add(
        "--allow-media-hosts",
        action="store_true",
        help="fetch media that requests name by http(s), from public addresses",
    )
    add(
        "--media-folder",
        action="append",
        default=[],
        metavar="DIR",
        help="requests may name media below it by file://; may be given again; default: none",
    )
    add(
        "--media-timeout",
        type=duration,
        default=defaults.media_timeout_s,
        metavar="SECONDS",
        help="for fetching one file, redirects included; default: %(default)g",
    )


def media_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerConfig` that the flags of `add_media_arguments` set.

    Raises:
        QuireError: a folder is none.
    """
    return {name: getattr(args, name) for name in _HELP} | {
        "allow_media_hosts": args.allow_media_hosts,
        "media_folders": tuple(_folder(each, "--media-folder") for each in args.media_folder),
        "media_timeout_s": args.media_timeout,
    }


def _folder(path: str, option: str) -> str:
    """The folder's absolute path.

    Raises:
        QuireError: it is no folder.
    """
    if not Path(path).is_dir():
        raise QuireError(f"{option}: '{path}' is no folder")
    return str(Path(path).resolve())

"""Long and hostile answers do not keep the page busy: its Markdown is read in linear time.

Each text is as long as the page reads; one that is longer is shown as it is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import quire.api.page
from tests.support.waiting import HANG_S

NODE = shutil.which("node")
READER = Path(quire.api.page.__file__).parent / "static" / "reader.js"
SIZE = 199_000

_SCRIPT = """
const { blocks } = await import(process.argv[2]);
const [before, repeated, after] = JSON.parse(process.argv[3]);
const text = before + repeated.repeat(Math.ceil(Number(process.argv[4]) / repeated.length)) + after;
const markup = blocks(text).map((each) => each.markup()).join("");
console.log("read", !markup.startsWith('<pre class="plain"') && markup.length > 0);
"""

TEXTS = {
    "punctuation behind a link": ("http://", "!", "a"),
    "links": ("", "http://a!) ", ""),
    "a heading of blanks": ("# ", " ", "a"),
    "a heading's marks": ("# a", " #", "a"),
    "a heading and a separator of lines": ("# ", " ", "\u2028x"),
    "an item and a separator of lines": ("- ", " ", "\u2028x"),
    "code without an end": ("` ", "a", "`"),
    "brackets": ("", "[", "](x)"),
    "links without an end": ("", "[a](", ""),
    "marks": ("", "**a _b ", ""),
    "rules": ("", "- ", "x"),
    "formulas without an end": ("", "\\( ", ""),
    "displays without an end": ("", "\\[ \n", ""),
    "environments without an end": ("", "\\begin{a}\n", ""),
    "dollars": ("", "$a ", ""),
}


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize("name", TEXTS)
def test_a_long_text_is_read_in_linear_time(name: str, tmp_path: Path) -> None:
    assert NODE is not None
    script = tmp_path / "read.mjs"
    script.write_text(_SCRIPT)
    done = subprocess.run(
        [NODE, str(script), READER.as_uri(), json.dumps(TEXTS[name]), str(SIZE)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.stdout.startswith("read true"), done.stderr[-2000:]

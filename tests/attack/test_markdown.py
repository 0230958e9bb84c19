"""Long and hostile answers do not keep the page busy: its Markdown is read in linear time.

Each text is so long that quadratic time would be hours.
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
MARKDOWN = Path(quire.api.page.__file__).parent / "static" / "markdown.js"
SIZE = 2_000_000

_SCRIPT = """
const node = () => ({ querySelector: () => null, append(...all) { this.all = all; },
  setAttribute() {}, addEventListener() {}, remove() {}, childNodes: [], classList: { add() {} } });
globalThis.document = { createElement: node, createElementNS: node,
  querySelector: () => null, createTextNode: (text) => ({ text }) };
const { Markdown, inline } = await import(process.argv[2]);
const [before, repeated, after] = JSON.parse(process.argv[3]);
const text = before + repeated.repeat(Math.ceil(Number(process.argv[4]) / repeated.length)) + after;
new Markdown(node()).show(text);
console.log("shown", inline(text.slice(0, 100)).length > 0);
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
}


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize("name", TEXTS)
def test_a_long_text_is_read_in_linear_time(name: str, tmp_path: Path) -> None:
    assert NODE is not None
    script = tmp_path / "read.mjs"
    script.write_text(_SCRIPT)
    done = subprocess.run(
        [NODE, str(script), MARKDOWN.as_uri(), json.dumps(TEXTS[name]), str(SIZE)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.stdout.startswith("shown true"), done.stderr[-2000:]

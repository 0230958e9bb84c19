"""Takes a picture of the page in each of its states: light, dark, on a phone, in Arabic and Hebrew.

python -m tests.api.screenshots FOLDER [STATE ...]
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from quire.api.app import build_app
from quire.core.config import ServerConfig
from quire.core.mcp import McpServer
from quire.core.request import Failure, Request
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import MODEL_DIR, Served, start
from tests.api.page_helpers import DONE, ask, opened, says
from tests.media.files import encoded_sound, pdf, tone
from tests.serving.test_mcp import PROGRAM
from tests.support.browser import BROWSER
from tests.support.scripted_engine import Script
from tests.support.server import serving, slow_models
from tests.support.waiting import HANG_S

RICH = r"""## Rotations

A rotation by $\theta$ maps \(a_1\) to \(b_1 = a_1\cos\theta\):

$$R = \begin{pmatrix} \cos\theta & -\sin\theta \\ \sin\theta & \cos\theta \end{pmatrix}$$

```python
def rotate(point: complex, angle: float) -> complex:
    return point * cmath.exp(1j * angle)  # a long comment that does not fit on a narrow screen
```

| Angle | Matrix | Determinant |
|---|:---:|---:|
| 0 | identity | 1 |
| 90 degrees | quarter turn | 1 |

1. Choose an angle.
2. Multiply.
   - *twice* turns **twice** as far

> Rotations keep lengths.
"""
ARABIC = """## الدوران

يدور **المتجه** حول الأصل بزاوية، و`x` يبقى كما هو.

- أولا: اختر الزاوية
- ثانيا: اضرب

> الدوران يحفظ الأطوال.

| الزاوية | المحدد |
|---|---|
| 90 | 1 |

```python
print("hello")
```
"""
HEBREW = "שלום! זו תשובה בעברית עם מספרים 123 ומילה אחת English בתוכה."


@dataclass(frozen=True, slots=True)
class Look:
    """One appearance of the page: its colour scheme and window size in pixels."""

    name: str
    scheme: str
    width: int
    height: int


LOOKS = (
    Look("light", "light", 1180, 800),
    Look("dark", "dark", 1180, 800),
    Look("phone", "light", 390, 780),
    Look("phone-dark", "dark", 390, 780),
)


def empty(page: Any, served: Served) -> None:
    """Show the page as a newcomer finds it."""


def answered(page: Any, served: Served) -> None:
    says(served, RICH)
    ask(page, "How do I rotate a point in the plane? Show the matrix and a little Python.")
    page.wait_for_selector(DONE)


def to_the_top(page: Any, served: Served) -> None:
    answered(page, served)
    page.evaluate("document.querySelector('.scroller').scrollTop = 0")


def right_to_left(page: Any, served: Served) -> None:
    says(served, ARABIC)
    ask(page, "كيف أدير نقطة في المستوى؟")
    page.wait_for_selector(DONE)
    says(served, HEBREW)
    ask(page, "ובעברית?")
    page.wait_for_selector(f"{DONE} >> nth=1")
    page.fill(".write textarea", "سؤال لم يرسل بعد")


def growing(page: Any, served: Served) -> None:
    held = threading.Event()
    served.engine.reset(lambda _: Script(served.ids(RICH), held=held, held_at=40))
    ask(page, "How do I rotate a point?")
    page.wait_for_selector(".assistant .text:has-text('Rotations')")


def cut_off(page: Any, served: Served) -> None:
    tokens = served.ids("One two three")
    served.engine.reset(lambda _: Script(tokens, error=Failure("The engine ended.", 500)))
    ask(page, "Count")
    page.wait_for_selector(".assistant .error")


def attached(page: Any, served: Served) -> None:
    sound = encoded_sound(tone(0.1), "wav", "pcm_s16le")
    for name, kind, data in (
        ("notes.md", "text/markdown", b"# Hello\n\nSome notes.\n"),
        ("a-table-with-a-rather-long-name.csv", "text/csv", b"a;b\n1;2\n"),
        ("paper.pdf", "application/pdf", pdf("Words of a paper")),
        ("beep.wav", "audio/wav", sound),
    ):
        page.set_input_files(
            ".composer input[type=file]", {"name": name, "mimeType": kind, "buffer": data}
        )
    page.fill(".write textarea", "What is in these files?")
    page.wait_for_timeout(200)


def sent_files(page: Any, served: Served) -> None:
    says(served, "They hold notes, a table and a paper.")
    attached(page, served)
    page.press(".write textarea", "Enter")
    page.wait_for_selector(DONE)


def versions(page: Any, served: Served) -> None:
    answered(page, served)
    says(served, "Multiply by a complex number of length one.")
    page.click("[aria-label='Answer again']")
    page.wait_for_selector(".assistant .text:has-text('length one')")
    page.wait_for_selector(DONE)


def thoughts(page: Any, served: Served) -> None:
    says(
        served,
        "<|channel>thought\nThe user wants *a rotation*.\nBy how much?<channel|>By how much?",
    )
    page.click("[aria-label=Parameters]")
    page.get_by_label("Thoughts").select_option("on")
    page.get_by_role("button", name="Use").click()
    ask(page, "Rotate")
    page.wait_for_selector(DONE)
    page.click(".thought summary")


def reading(page: Any, served: Served) -> None:
    served.engine.reset(lambda _: Script(reads=(2, 6), cached_tokens=2, silent=True))
    ask(page, "How do I rotate a point?")
    page.wait_for_selector(".loading-words:has-text('from the cache')")


def loading(page: Any, served: Served) -> None:
    listed = page.request.get(f"{served.url}/v1/models").json()
    progress = {"stage": "weights", "done": 2 * 10**9, "total": 5 * 10**9}
    listed["data"][0] |= {"state": "loading", "progress": progress}
    page.route("**/v1/models", lambda route: route.fulfill(json=listed))
    served.engine.reset(lambda _: Script(silent=True))
    ask(page, "How do I rotate a point?")
    page.wait_for_selector(".loading-words:has-text('5.0 GB')")


def compared(page: Any, served: Served) -> None:
    versions(page, served)
    page.click("[aria-label='Compare versions']")


def edited(page: Any, served: Served) -> None:
    versions(page, served)
    page.click("[aria-label='Edit and send again']")


def long_message(page: Any, served: Served) -> None:
    says(served, "I see.")
    ask(page, "\n".join(f"Line {number} of a long text." for number in range(80)))
    page.wait_for_selector(DONE)


def parameters(page: Any, served: Served) -> None:
    page.click("[aria-label=Parameters]")


def prompts(page: Any, served: Served) -> None:
    page.press(".write textarea", "/")


def kept_prompts(page: Any, served: Served) -> None:
    long = "Explain it to a child of ten years, in short sentences, with one example from life."
    kept = {
        "Simple": long,
        "مراجعة": "صحح هذا النص",
        "A name of a prompt that is rather long to show": "x",
    }
    page.evaluate("kept => localStorage['quire.prompts'] = JSON.stringify(kept)", kept)
    page.fill(".write textarea", "Say it in one word.")
    page.click("[aria-label='Prompts (/)']")
    page.wait_for_selector(".prompt")


def presets(page: Any, served: Served) -> None:
    kept = {"Poet": {"system": "You are a poet.", "temperature": 1.2, "kv": "page-4"}}
    page.evaluate("kept => localStorage['quire.presets'] = JSON.stringify(kept)", kept)
    page.click("[aria-label=Parameters]")
    page.get_by_label("Preset", exact=True).select_option("Poet")
    page.evaluate("document.querySelector('dialog').scrollTop = 1e6")


def refused_file(page: Any, served: Served) -> None:
    for name, data in (("notes.md", b"# Hello"), ("film.mp4", b"\0")):
        file = {"name": name, "mimeType": "", "buffer": data}
        page.set_input_files(".composer input[type=file]", file)
    page.wait_for_timeout(200)


def gone(page: Any, served: Served) -> None:
    answered(page, served)
    page.context.set_offline(True)
    page.wait_for_selector("#state[data-state=gone]")


def key_asked(page: Any, served: Served) -> None:
    error = {"error": {"message": "no API key", "type": "authentication_error"}}
    page.route("**/v1/**", lambda route: route.fulfill(status=401, json=error))
    ask(page, "Hello")
    page.wait_for_selector("dialog[aria-label='API key']")


def shortcuts(page: Any, served: Served) -> None:
    page.click("[aria-label='Keyboard shortcuts']")


def exporting(page: Any, served: Served) -> None:
    answered(page, served)
    page.click("[aria-label='Export conversation']")


def confirmed(page: Any, served: Served) -> None:
    def script(request: Request) -> Script:
        called = "<|tool_call>call:small__add{a:2,b:40}<tool_call|>"
        return Script(served.ids(f"I shall add.{called}"))

    served.engine.reset(script)
    page.click("[aria-label=Parameters]")
    page.locator("fieldset label", has_text="small").locator("input").check()
    page.get_by_role("button", name="Use").click()
    ask(page, "What is 2 + 40?")
    page.get_by_role("button", name="Allow once").wait_for()


def drawer(page: Any, served: Served) -> None:
    for text in ("Rotations #maths", "كيف حالك", "A holiday in the mountains with much snow"):
        says(served, "Yes.")
        ask(page, text)
        page.wait_for_selector(DONE)
        page.click(".new", force=True) if page.locator(
            ".new"
        ).is_visible() else page.keyboard.press("Control+Shift+O")
        page.wait_for_selector(".welcome")
    if page.locator("#menu").is_visible():
        page.click("#menu")


def tagged(page: Any, served: Served) -> None:
    drawer(page, served)
    row = page.locator(".entries li", has_text="Rotations")
    row.hover()
    row.locator("[aria-label^=Rename]").click()
    page.fill(".rename", "Rotations in the plane #maths #school-work")
    page.keyboard.press("Enter")
    page.click(".tag:has-text('#maths')")


def renamed(page: Any, served: Served) -> None:
    drawer(page, served)
    row = page.locator(".entries li", has_text="A holiday")
    row.hover()
    row.locator("[aria-label^=Rename]").click()


def not_found(page: Any, served: Served) -> None:
    drawer(page, served)
    page.fill(".search", "no such words")
    file = {"name": "other.json", "mimeType": "application/json", "buffer": b"[]"}
    page.set_input_files(".side input[type=file]", file)
    page.wait_for_selector(".side .error:not([hidden])")


def live(page: Any, served: Served) -> None:
    growing(page, served)
    page.goto(f"{served.url}/#live")
    page.wait_for_selector(".streams tbody tr")


def live_below(page: Any, served: Served) -> None:
    wrong = {"messages": [{"role": "user", "content": "Hello"}], "temperature": "hot"}
    page.request.post(f"{served.url}/v1/chat/completions", data=wrong)
    answered(page, served)
    page.goto(f"{served.url}/#live")
    page.wait_for_selector("[aria-label='Refused requests'] tbody tr")
    page.evaluate("document.querySelector('#live').scrollTop = 1e6")


def documented(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/docs")
    page.wait_for_selector(".contents li")


def described(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/docs#post-v1-chat-completions")
    page.locator(".operation summary").first.click()


def several(page: Any, served: Served) -> None:
    page.fill(".write textarea", "Which?")
    page.click("[aria-label='Ask several models']")


def side_by_side(page: Any, served: Served) -> None:
    says(served, RICH)
    several(page, served)
    page.get_by_role("button", name="Ask", exact=True).click()
    for column in page.locator("dialog .column").all():
        column.locator(".text:has-text('lengths')").wait_for()


def two_models(page: Any, served: Served) -> None:
    page.goto(f"{served.url}/#live")
    page.wait_for_selector(".model:has-text('b')")


STATES: dict[str, Callable[[Any, Served], None]] = {
    each.__name__: each
    for each in (
        *(empty, answered, to_the_top, right_to_left, thoughts, loading, reading, growing, cut_off),
        *(attached, refused_file, sent_files, versions, compared, edited, long_message),
        *(parameters, presets, prompts, kept_prompts, shortcuts, exporting, confirmed),
        *(drawer, tagged, renamed, not_found, gone, key_asked),
        *(live, live_below, documented, described),
    )
}
WITH_TWO_MODELS: dict[str, Callable[[Any, Served], None]] = {
    each.__name__: each for each in (several, side_by_side, two_models)
}


def two(stack: ExitStack, served: Served) -> Served:
    """Serve the same answers under two models' names."""
    opening = threading.Event()
    opening.set()
    models = slow_models(served.engine, opening)
    return replace(served, url=stack.enter_context(serving(build_app(models, ServerConfig()))))


def main(folder: Path, names: list[str]) -> None:
    """Write `STATE-LOOK.png` for each state and look."""
    folder.mkdir(parents=True, exist_ok=True)
    child = McpServer("small", PROGRAM, timeout_s=HANG_S)
    modalities = ("text", "image", "audio")
    with ExitStack() as stack:
        config = ServerConfig(mcp_servers=(child,))
        tokenizer = Tokenizer.open(MODEL_DIR)
        served = start(stack, tokenizer, config, modalities=modalities)
        states = dict.fromkeys(STATES, served) | dict.fromkeys(WITH_TWO_MODELS, two(stack, served))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for name in names or states:
            for look in LOOKS:
                path = folder / f"{name}-{look.name}.png"
                show(browser, states[name], name, look=look, path=path)


def show(browser: Any, served: Served, name: str, *, look: Look, path: Path) -> None:
    """Bring a fresh page into a state, and take its picture."""
    size: Any = {"width": look.width, "height": look.height}
    touch = look.name.startswith("phone")
    context = browser.new_context(viewport=size, color_scheme=look.scheme, has_touch=touch)
    page = context.new_page()
    opened(page, served.url)
    (STATES | WITH_TWO_MODELS)[name](page, served)
    page.wait_for_timeout(150)
    page.screenshot(path=path)
    page.evaluate("document.querySelector('[aria-label=Stop]:not([hidden])')?.click()")
    page.wait_for_timeout(50)
    served.engine.reset(lambda _: Script())
    context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

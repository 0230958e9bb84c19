"""The page in a real browser: what people do with it, and what a model's answer cannot do."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.api.app import build_app
from quire.core.config import ServerConfig
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Served, start
from tests.api.page_helpers import DONE, ask, opened, prompt_of, says
from tests.core.test_figures import DURATIONS, SIZES
from tests.media.files import encoded_sound, pdf, tone
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.server import one_model, serving, slow_models
from tests.support.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api")

MARKDOWN = """## Title

Some **bold** and `code`.

```python
print("hi")
```

- one
- two

| a | b |
|---|---|
| 1 | 2 |
"""
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">

[click](javascript:window.hacked=3) ![pic](http://evil.test/x.png) [data](data:text/html,hi)

```html
<script>window.hacked = 4</script>
```
"""


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    with ExitStack() as stack:
        yield start(stack, tokenizer, ServerConfig())


def test_an_answer_is_shown_as_markdown_and_kept(page: Any, served: Served) -> None:
    says(served, MARKDOWN)
    opened(page, served.url)
    ask(page, "Show me")
    page.wait_for_selector(DONE)
    answer = page.locator(".assistant .text")
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("pre code").inner_text() == 'print("hi")'
    assert answer.locator("pre .hljs-built_in").inner_text() == "print"
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("td").all_inner_texts() == ["1", "2"]
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # no HTTPS
    page.click("[aria-label='Copy code']")
    page.wait_for_selector("#announcer:text-is('Copied.')")
    page.focus(".write textarea")
    page.keyboard.press("Control+V")
    assert page.locator(".write textarea").input_value() == 'print("hi")'
    page.reload()
    page.wait_for_selector(".assistant strong")
    assert page.locator(".entries .entry").all_inner_texts() == ["Show me"]


GROWS = """async (text) => {
  const { Markdown } = await import("/page/markdown.js");
  const [grown, whole] = [document.createElement("div"), document.createElement("div")];
  document.querySelector(".messages").replaceChildren(grown, whole);
  const growing = new Markdown(grown);
  const kept = new Set();
  for (let end = 1; end <= text.length; end += 3) {
    growing.show(text.slice(0, end));
    for (const node of grown.querySelectorAll("li, tr, .hljs-keyword")) kept.add(node);
  }
  growing.show(text);
  new Markdown(whole).show(text);
  const spans = (root) => [...root.querySelectorAll("code span")];
  const said = (root) => [root.innerText, ...spans(root).map((each) => each.outerHTML)];
  const drawn = grown.querySelectorAll("li, tr, .hljs-keyword").length;
  return [said(grown), said(whole), grown.querySelector("pre").innerText, kept.size / drawn];
}"""
PROGRAM = """def f(x: str = "a\\
b") -> int:
    \"\"\"Says

    why.\"\"\"
    return g(x, 3.5)  # as it is

"""


@pytest.mark.slow
def test_what_grows_is_what_is_drawn_at_once(page: Any, served: Served) -> None:
    opened(page, served.url)
    code = PROGRAM * 15  # more than a block of lines
    table = "| a | b |\n|---|---|\n" + "| 1 | **2** |\n" * 5
    text = f"```python\n{code}\n```\n\n" + "- one\n  1. two\n- [ ] three\n" * 5 + f"\n{table}"
    grown, whole, shown, drawn = page.evaluate(GROWS, text)
    assert grown == whole
    assert shown.rstrip("\n") == code.rstrip("\n")
    assert drawn < 20  # times that a part was drawn; anew with each piece it would be hundreds


MATHS = r"""The sum \(a_1 + a_2\) and $x^2$ cost $5 and $10.

\[
\begin{pmatrix} a & b \\ c & d \end{pmatrix}
\]

Not a formula: \(\nosuchcommand{\).
"""


def test_formulas_are_typeset_and_money_is_not(page: Any, served: Served) -> None:
    says(served, MATHS)
    opened(page, served.url)
    ask(page, "Show me")
    page.wait_for_selector(DONE)
    answer = page.locator(".assistant .text")
    sources = answer.locator("annotation").all_text_contents()
    assert sources[:2] == ["a_1 + a_2", "x^2"]
    assert sources[2] == r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}"
    assert answer.locator(".display mtr").count() == 2
    assert "cost $5 and $10." in answer.inner_text()
    assert answer.locator(".math.raw").inner_text() == r"\nosuchcommand{"
    heights = page.evaluate("() => document.querySelector('.katex-strut').style.height")
    assert heights  # the policy lets KaTeX size what it draws


OPEN = r"""The sum \(a_1 + b_1 and \[c

\[
a & b \\
c"""


def test_a_formula_without_an_end_stands_as_it_is_written(page: Any, served: Served) -> None:
    says(served, OPEN, silent=True)
    opened(page, served.url)
    ask(page, "Show me")
    page.wait_for_selector(".assistant .plain:has-text('c')")
    assert page.locator(".assistant .text > p").all_inner_texts() == OPEN.split("\n\n")
    page.click("[aria-label=Stop]")


def test_text_runs_as_its_language_does(page: Any, served: Served) -> None:
    quote, table = "> ציטוט\n\n", "| אחת | two |\n|---|---|\n| 1 | 2 |\n"
    says(served, f"שלום עולם\n\n- אחת\n- שתיים\n\nEnglish\n\n{quote}{table}")
    opened(page, served.url)
    ask(page, "مرحبا بالعالم")
    page.wait_for_selector(DONE)
    ways = """(all) => all.map((each) => getComputedStyle(each).direction)"""
    blocks = page.locator(".assistant .text > *")
    assert blocks.evaluate_all(ways) == ["rtl", "rtl", "ltr", "rtl", "rtl"]
    bar = "(quote) => getComputedStyle(quote).borderRightWidth"
    assert page.locator(".assistant blockquote").evaluate(bar) == "3px"
    clear = """() => {
      const box = (name) => document.querySelector(name).getBoundingClientRect();
      const padding = getComputedStyle(document.querySelector(".entry")).paddingRight;
      return box(".entry").right - parseFloat(padding) <= box(".entry-actions").left + 1;
    }"""
    assert page.evaluate(clear)  # the buttons cover no word of the title
    named = ".user .text, .entry, .title"
    assert page.locator(named).evaluate_all(ways) == ["rtl", "rtl", "rtl"]
    page.fill(".write textarea", "שלום")
    assert page.locator(".write textarea").evaluate_all(ways) == ["rtl"]


def test_nothing_that_a_model_writes_runs(page: Any, served: Served) -> None:
    says(served, HOSTILE)
    opened(page, served.url)
    ask(page, "Attack")
    page.wait_for_selector(DONE)
    answer = page.locator(".assistant .text")
    assert "<script>window.hacked = 1</script>" in answer.inner_text()
    assert answer.locator("script, img, iframe").count() == 0
    links = [link.get_attribute("href") for link in answer.locator("a").all()]
    assert links == ["http://evil.test/x.png"]  # to be followed by hand alone
    assert "noopener" in (answer.locator("a").get_attribute("rel") or "")
    assert page.evaluate("typeof window.hacked") == "undefined"


def test_markup_is_refused_even_where_the_page_would_write_it(page: Any, served: Served) -> None:
    opened(page, served.url)
    with pytest.raises(sync_api.Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")


def test_stop_then_edit_and_send_again(page: Any, served: Served) -> None:
    says(served, "It goes on", silent=True)
    opened(page, served.url)
    ask(page, "First wording")
    page.wait_for_selector(".assistant .text:has-text('goes on')")
    page.click("[aria-label=Stop]")
    page.wait_for_selector(".note:has-text('Stopped')")
    tokens = len(served.ids("It goes on"))
    page.wait_for_selector(f".stats:has-text('{tokens} tokens'):has-text('first after')")
    says(served, "Better")
    page.click("[aria-label='Edit and send again']")
    page.fill(".editing textarea", "Second wording")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant .text:has-text('Better')")
    assert page.locator(".user .text").all_inner_texts() == ["Second wording"]
    prompt = prompt_of(served, served.engine.requests[-1])
    assert "Second wording" in prompt
    assert "First wording" not in prompt


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(
    page: Any, served: Served
) -> None:
    says(served, "It goes on", silent=True)
    opened(page, served.url)
    ask(page, "Of no use")
    page.wait_for_selector(".assistant .text:has-text('goes on')")
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("[aria-label='Delete Of no use']")
    page.wait_for_selector(".welcome")
    wait_until(lambda: served.engine.tickets[-1].aborted is not None)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".entry").all_inner_texts() == []


@pytest.mark.slow
def test_the_conversation_used_last_stands_first(page: Any, served: Served) -> None:
    says(served, "Yes")
    opened(page, served.url)
    for question in ("Older", "Newer"):
        page.click(".new")
        ask(page, question)
        page.wait_for_selector(DONE)
    page.click(".entry:has-text('Older')")
    ask(page, "Again")
    page.wait_for_selector(".assistant:not([aria-busy]) >> nth=1")
    assert page.locator(".entry").all_inner_texts() == ["Older", "Newer"]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".entry").all_inner_texts() == ["Older", "Newer"]


@pytest.mark.slow
def test_the_keyboard_never_loses_its_place(page: Any, served: Served) -> None:
    def at(label: str) -> None:
        page.wait_for_selector(f"[aria-label='{label}']:focus")

    says(served, "It goes on", silent=True)
    opened(page, served.url)
    at("Message")
    page.keyboard.type("Hello")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the send button, which goes
    page.wait_for_selector(".assistant .text:has-text('goes on')")
    at("Message")
    page.keyboard.press("Tab")
    at("Stop")
    page.keyboard.press("Enter")
    page.wait_for_selector(".note:has-text('Stopped')")
    at("Message")
    says(served, "Better")
    page.focus("[aria-label='Edit and send again']")
    page.keyboard.press("Enter")
    at("Edit message")
    page.keyboard.press("Escape")
    at("Edit and send again")
    page.focus("[aria-label='Answer again']")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant .text:has-text('Better')")
    at("Message")
    page.focus(".new")
    page.keyboard.press("Enter")
    at("Message")
    page.focus(".skip")
    page.keyboard.press("Enter")
    at("Message")


@pytest.mark.slow
def test_parameters_go_along(page: Any, served: Served) -> None:
    says(served, "Fine")
    opened(page, served.url)
    page.click("[aria-label=Parameters]")
    page.get_by_label("System message").fill("You are a poet")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Use").click()
    ask(page, "Hello")
    page.wait_for_selector(DONE)
    request = served.engine.requests[-1]
    assert "You are a poet" in prompt_of(served, request)
    assert request.sampling.temperature == 0.5


def test_an_error_is_shown(page: Any, served: Served) -> None:
    opened(page, served.url)
    served.engine.reset(lambda _: Script())
    served.engine.failure = "the device is gone"
    ask(page, "Hello")
    page.wait_for_selector(".error:has-text('the device is gone')")
    served.engine.failure = None


@pytest.mark.slow
def test_the_key_is_asked_for_once(page: Any, tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig(api_keys=("secret", "another")))
        says(served, "Welcome")
        page.goto(served.url)
        page.get_by_label("API key").last.fill("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog:has-text('does not know')")
        page.get_by_label("API key").last.fill("secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("html[data-ready]")
        assert page.evaluate("document.activeElement.ariaLabel") == "Message"
        opened(page, served.url)
        ask(page, "Hello")
        page.wait_for_selector(".assistant .text:has-text('Welcome')")
        page.click("nav >> text=Live")
        page.wait_for_selector(".model .hint:has-text('not unload it')")
        assert page.get_by_role("button", name="Unload").count() == 0


@pytest.mark.slow
def test_the_header_says_when_the_server_is_gone_and_back(page: Any, served: Served) -> None:
    opened(page, served.url)
    page.wait_for_selector("#state[data-state=loaded]:has-text('quire-demo')")
    page.route("**/v1/**", lambda route: route.abort())
    ask(page, "Hello")
    page.wait_for_selector(".assistant .error:has-text('cannot be reached')")
    page.wait_for_selector("#state[data-state=gone]:has-text('not reachable')")
    page.unroute("**/v1/**")
    page.wait_for_selector("#state[data-state=loaded] .words:text-is('loaded')")


def test_a_page_without_its_key_says_so_and_takes_one(page: Any, tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig(api_keys=("secret",)))
        says(served, "Welcome")
        page.set_viewport_size({"width": 390, "height": 740})
        page.goto(served.url)
        page.get_by_role("button", name="Not now").click()
        page.wait_for_selector("html[data-ready]")
        assert page.locator(".write textarea").bounding_box()["height"] > 30
        ask(page, "Hello")
        page.get_by_role("dialog").wait_for()
        page.reload()
        page.get_by_role("button", name="Not now").click()
        page.wait_for_selector(".note:has-text('Not answered')")
        page.click("[aria-label='Answer again']")
        page.get_by_role("button", name="Not now").click()
        page.wait_for_selector(".assistant .error:has-text('needs an API key')")
        page.reload()
        page.get_by_role("button", name="Not now").click()
        page.wait_for_selector(".assistant .error:has-text('needs an API key')")
        page.get_by_role("button", name="Enter key").click()
        page.get_by_label("API key").last.fill("secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#state[data-state=loaded] >> text=Forget key")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.click("[aria-label='Answer again']")
        page.wait_for_selector(".assistant .text:has-text('Welcome')")


def test_the_live_view_shows_a_stream(page: Any, served: Served) -> None:
    says(served, "It goes on", silent=True)
    opened(page, served.url)
    ask(page, "Hello")
    page.wait_for_selector(".assistant .text:has-text('goes on')")
    page.click("nav >> text=Live")
    page.wait_for_selector(".streams td:has-text('writing')")
    shown = page.locator("[aria-label='Guessed tokens']").inner_text()
    guessed = [line for line in shown.split("\n") if line]
    assert guessed[:2] == ["Guessed tokens", "60%"]
    assert guessed[-4:] == ["The text so far", "30 of 40", "A head of the model", "0 of 10"]
    page.click("nav >> text=Chat")
    page.click("[aria-label=Stop]")
    page.click("nav >> text=Live")
    page.wait_for_selector("text=No request is running.")


def test_what_was_refused_is_shown(page: Any, served: Served) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello"}], "temperature": "<b>hot</b>"}
    for _ in range(2):
        assert HTTP.post(f"{served.url}/v1/chat/completions", json=asked).status_code == 400
    served.settle()
    opened(page, f"{served.url}/#live")
    row = page.locator("[aria-label='Refused requests'] tbody tr").first
    row.get_by_text("temperature").wait_for()
    assert row.locator("td").nth(1).inner_text() == "/v1/chat/completions"
    assert row.locator("td").nth(2).inner_text() == "400"
    assert row.locator("td").last.inner_text() == "2"


def test_the_reading_of_a_prompt_is_shown(page: Any, served: Served) -> None:
    served.engine.reset(lambda _: Script(reads=(2, 6), cached_tokens=2, silent=True))
    opened(page, served.url)
    ask(page, "Hello")
    page.wait_for_selector(".assistant .note:has-text('Reading the prompt…')")
    page.wait_for_selector(
        ".assistant .loading-words:text-matches('6 of [0-9]+ tokens .*2 from the cache')"
    )
    page.click("nav >> text=Live")
    page.wait_for_selector(".streams td:text-matches('^reading, [0-9]+%$')")
    page.click("nav >> text=Chat")
    page.click("[aria-label=Stop]")
    page.wait_for_selector(".note:has-text('Stopped')")
    assert page.get_by_text("Reading the prompt").count() == 0


@pytest.mark.slow
def test_a_live_view_opened_later_shows_what_was_and_when_it_last_knew(
    page: Any, served: Served
) -> None:
    served.engine.reset(
        lambda _: Script(served.ids("Fine"), cached_tokens=3, reuse="first difference at token 3")
    )
    asked = {"messages": [{"role": "user", "content": "Hello"}]}
    assert HTTP.post(f"{served.url}/v1/chat/completions", json=asked).status_code == 200
    opened(page, f"{served.url}/#live")
    ended = page.locator("[aria-label='Last requests'] tbody tr").first
    ended.get_by_text("Cached up to token 3, then different").wait_for()
    assert re.search(r"\t3 of \d+\t", ended.inner_text())
    shown = HTTP.get(f"{served.url}/metrics", headers={"accept": "application/json"}).json()
    shown["ended"] = [shown["ended"][0] | {"first_token_s": 0.202}]
    page.route("**/metrics", lambda route: route.fulfill(json=shown))
    page.wait_for_selector(".tile:has-text('first token'):has-text('202 ms')")
    page.unroute("**/metrics")
    written = page.get_by_role("img", name="Tokens written a second")
    written.and_(page.locator("svg:not([aria-label*=' 0 at most'])")).wait_for()
    page.route("**/metrics", lambda route: route.abort())
    page.wait_for_selector(".stale .error:has-text('These figures are from')")
    page.unroute("**/metrics")
    page.wait_for_selector(".live-inner:not(.stale)")


LINES = """(node) => {
  const range = document.createRange();
  range.selectNodeContents(node);
  return range.getClientRects().length;
}"""


@pytest.mark.slow
def test_a_phone_has_a_drawer_and_nothing_is_cut_off(page: Any, served: Served) -> None:
    words = ("Angle of the rotation", "Matrix in the plane", "Determinant")
    says(served, f"{MARKDOWN}\n\n|{'|'.join(words)}|\n|-|-|-|\n|0|1|1|")
    page.set_viewport_size({"width": 360, "height": 740})
    opened(page, served.url)
    ask(page, "Show me")
    page.wait_for_selector(DONE)
    page.click("[aria-label='Answer again']")
    page.wait_for_selector(DONE)
    page.click("[aria-label='Compare versions']")
    heads = page.locator("dialog .column >> nth=0 >> th:has-text('Determinant')")
    assert heads.evaluate(LINES) == 1  # no word is broken: the table scrolls
    close = page.get_by_role("button", name="Close")
    assert close.evaluate("(node) => node.getBoundingClientRect().bottom < innerHeight")
    close.click()
    for view in ("#chat", "#live"):
        page.goto(served.url + "/" + view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.goto(served.url + "/#chat")
    page.click("#menu")
    page.click(".new")
    page.wait_for_selector(".welcome")


@pytest.mark.slow
def test_a_long_answer_is_followed_until_one_scrolls_up(page: Any, served: Served) -> None:
    rest = """() => {
      const { scrollHeight, scrollTop, clientHeight } = document.querySelector(".scroller");
      return Math.round(scrollHeight - scrollTop - clientHeight);
    }"""
    lines = served.ids("One more line. \n\n" * 60)
    opened(page, served.url)
    served.engine.reset(lambda _: Script(tokens=lines, group=len(lines)))
    ask(page, "All at once")
    page.wait_for_selector(DONE)
    page.wait_for_function(f"({rest})() < 2")
    served.engine.reset(lambda _: Script(tokens=lines, group=len(lines) // 8, delay_s=0.1))
    ask(page, "Bit by bit")
    page.wait_for_selector(".assistant >> nth=1 >> p >> nth=12")
    page.evaluate("document.querySelector('.scroller').scrollTop = 100")
    page.wait_for_selector(f"{DONE} >> nth=1")
    assert page.evaluate(rest) > 1000


@pytest.mark.slow
def test_the_page_spells_figures_as_the_terminal_does(page: Any, served: Served) -> None:
    opened(page, served.url)
    spelled = """async ([sizes, durations]) => {
      const { bytes, seconds } = await import("/page/figures.js");
      return [sizes.map(bytes), durations.map(seconds)];
    }"""
    sizes, durations = page.evaluate(spelled, [list(SIZES), list(DURATIONS)])
    assert (sizes, durations) == (list(SIZES.values()), list(DURATIONS.values()))


@pytest.mark.slow
def test_docs_show_every_operation(page: Any, served: Served) -> None:
    page.goto(served.url + "/docs")
    page.wait_for_selector(".operation")
    paths = page.request.get(served.url + "/openapi.json").json()["paths"]
    assert page.locator(".operation").count() == sum(map(len, paths.values()))
    page.click("[aria-label='Theme: auto. Change to light']")
    page.click("[aria-label='Theme: light. Change to dark']")
    page.goto(served.url)
    page.wait_for_selector("html[data-theme=dark] [aria-label^='Theme: dark']")


@pytest.mark.slow
def test_a_model_is_picked_and_the_live_view_follows_what_is_loaded(
    page: Any, served: Served, tokenizer: Tokenizer
) -> None:
    engine = ScriptedEngine(served.engine.info, lambda _: Script(served.ids("Chosen")))
    opening = threading.Event()

    with serving(build_app(slow_models(engine, opening), ServerConfig())) as url:
        opened(page, url)
        page.click("nav >> text=Live")
        page.wait_for_selector(".model:has-text('unloaded')")
        page.click("nav >> text=Chat")
        page.get_by_label("Model", exact=True).select_option("b")
        page.wait_for_selector("#state[data-state=unloaded]:has-text('unloaded')")
        page.route("**/v1/models", lambda route: route.abort())
        ask(page, "Who?")
        waiting = page.locator(".assistant .note:has-text('Loading b…')")
        waiting.wait_for()  # before the server has said so
        page.unroute("**/v1/models")
        waiting.get_by_text("2.0 GB of 5.0 GB read").wait_for()
        assert waiting.locator("progress").evaluate("bar => bar.value") == 0.4
        opening.set()
        page.wait_for_selector(".assistant .text:has-text('Chosen')")
        assert page.locator(".assistant .note").count() == 0
        page.wait_for_selector(".assistant .stats:has-text('loading the model included')")
        assert page.locator(".assistant .who").inner_text() == "b"
        page.reload()
        page.wait_for_selector("#state[data-state=loaded] .words:text-is('loaded')")
        assert page.get_by_label("Model", exact=True).input_value() == "b"
        page.click("nav >> text=Live")
        page.wait_for_selector(".model:has-text('b'):has-text('gemma4')")
        page.wait_for_selector(".pools:has(h3:text-is('b')) figcaption")
        listed = page.request.get(url + "/v1/models").json()["data"]
        assert [each["state"] for each in listed] == ["unloaded", "loaded"]
        page.click("[aria-label='Load a']")
        page.wait_for_selector("[aria-label='Unload a']:focus")
        page.wait_for_selector(".pools:has(h3:text-is('a')) figcaption")
        assert page.get_by_text("3.0 GB").count() == 1  # free on the machine, not twice
        page.click("[aria-label='Unload b']")
        page.wait_for_selector("[aria-label='Load b']")
        page.locator(".pools h3:text-is('b')").wait_for(state="detached")
        assert page.locator("figcaption").count() == 1
        opening.clear()
        page.click("[aria-label='Load b']")
        page.click("[aria-label='Stop loading b']")
        page.wait_for_selector(".model .error:has-text('was stopped')")
        page.wait_for_selector("[aria-label='Load b']")
        with page.expect_response("**/v1/models"):
            pass  # the page asks again, and says it still
        assert page.locator(".model .error:has-text('was stopped')").is_visible()
        opening.set()  # the thread that waits


GIVE = """async ([kind, selector]) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 32, height: 32 });
  canvas.getContext("2d").fillRect(4, 4, 20, 20);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve));
  const data = new DataTransfer();
  data.items.add(new File([blob], "square.png", { type: "image/png" }));
  const more = { bubbles: true, cancelable: true };
  const event = kind === "paste"
    ? new ClipboardEvent("paste", { clipboardData: data, ...more })
    : new DragEvent("drop", { dataTransfer: data, ...more });
  document.querySelector(selector).dispatchEvent(event);
}"""


@pytest.mark.slow
def test_files_are_pasted_dropped_and_sent_and_the_talk_is_exported(
    page: Any, served: Served
) -> None:
    info = replace(served.engine.info, modalities=("text", "image", "audio"))
    engine = ScriptedEngine(info, lambda _: Script(served.ids("Two squares")))
    config = ServerConfig()
    with serving(build_app(one_model(engine, "quire-demo", config), config)) as url:
        opened(page, url)
        page.evaluate(GIVE, ["paste", ".write textarea"])
        page.wait_for_selector(".thumb >> nth=0")
        page.evaluate(GIVE, ["drop", "body"])
        page.wait_for_selector(".thumb >> nth=1")
        packed = {"name": "a.zip", "mimeType": "application/zip", "buffer": b"PK\0\1"}
        page.set_input_files(".composer input[type=file]", packed)
        page.wait_for_selector(".composer .error:has-text('a.zip is of no kind')")
        film = {"name": "film.mp4", "mimeType": "video/mp4", "buffer": b"film"}
        page.set_input_files(".composer input[type=file]", film)
        page.wait_for_selector(
            ".composer .error:has-text('film.mp4 is not sent: quire-demo takes no video')"
        )
        beep = {
            "name": "beep.wav",
            "mimeType": "audio/wav",
            "buffer": encoded_sound(tone(0.1), "wav", "pcm_s16le"),
        }
        page.set_input_files(".composer input[type=file]", beep)
        page.wait_for_selector(".thumb:has-text('beep.wav')")
        ask(page, "What are they?")
        page.wait_for_selector(".assistant .text:has-text('Two squares')")
        page.wait_for_selector(DONE)
        assert [each.item.kind for each in engine.requests[-1].media] == ["image", "image", "audio"]
        page.wait_for_selector(".user audio[controls]")
        for kind, expected in (
            ("Markdown", "(picture: square.png)"),
            ("JSON", "data:image/png;base64,"),
        ):
            page.click("[aria-label='Export conversation']")
            with page.expect_download() as download:
                page.get_by_role("button", name=kind, exact=True).click()
            text = Path(download.value.path()).read_text()
            assert expected in text
            assert "Two squares" in text


def test_text_and_documents_are_sent_with_their_names(page: Any, served: Served) -> None:
    says(served, "Read")
    opened(page, served.url)
    files = [
        ("notes.md", "text/markdown", b"# Hello\n```py\nx = 1\n```\n"),
        ("data.csv", "text/csv", b"a;b\n1;2\n"),
        ("main.rs", "", b"fn main() {}\n"),
        ("paper.pdf", "application/pdf", pdf("Words of a paper")),
    ]
    for name, mime, body in files:
        data = {"name": name, "mimeType": mime, "buffer": body}
        page.set_input_files(".composer input[type=file]", data)
        page.wait_for_selector(f".thumb:has-text('{name}')")
    latin = {"name": "latin.txt", "mimeType": "text/plain", "buffer": "é".encode("latin-1")}
    page.set_input_files(".composer input[type=file]", latin)
    page.wait_for_selector(".composer .error:has-text('text (UTF-8)')")
    ask(page, "What is in them?")
    page.wait_for_selector(DONE)
    prompt = prompt_of(served, served.engine.requests[-1])
    assert "notes.md\n\n````\n# Hello\n```py\nx = 1\n```\n````" in prompt
    assert "data.csv\n\n```\na;b\n1;2\n```" in prompt
    assert "main.rs\n\n```\nfn main() {}\n```" in prompt
    assert "paper.pdf" in prompt
    assert "Words of a paper" in prompt
    page.click(".user .attached:has-text('data.csv') summary")
    assert page.locator(".attached[open] pre").inner_text().strip() == "a;b\n1;2"
    page.reload()
    page.wait_for_selector(".user .chip:has-text('paper.pdf')")


@pytest.mark.slow
def test_sound_is_recorded_where_the_model_hears(browser: Any, served: Served) -> None:
    info = replace(served.engine.info, modalities=("text", "audio"))
    engine = ScriptedEngine(info, lambda _: Script(served.ids("Heard")))
    config = ServerConfig()
    with serving(build_app(one_model(engine, "quire-demo", config), config)) as url:
        page = browser.new_page()
        page.add_init_script(MICROPHONE)
        opened(page, url)
        page.click("[aria-label='Record sound']")
        page.wait_for_selector("[aria-label='Stop recording'][aria-pressed=true]")
        page.wait_for_timeout(300)
        page.click("[aria-label='Stop recording']")
        page.wait_for_selector(".thumb:has-text('recording-')")
        page.keyboard.press("Enter")
        page.wait_for_selector(".assistant .text:has-text('Heard')")
        assert [each.item.kind for each in engine.requests[-1].media] == ["audio"]
        page.close()


MICROPHONE = """navigator.mediaDevices.getUserMedia = async () => {
  const context = new AudioContext();
  const [tone, microphone] = [context.createOscillator(), context.createMediaStreamDestination()];
  tone.connect(microphone);
  tone.start();
  return microphone.stream;
};"""


def test_a_file_that_is_refused_does_not_stand_in_the_way(page: Any, served: Served) -> None:
    info = replace(served.engine.info, modalities=("text", "image"), trained_length=4)
    engine = ScriptedEngine(info, lambda _: Script(served.ids("Fine")))
    config = ServerConfig()
    with serving(build_app(one_model(engine, "quire-demo", config), config)) as url:
        opened(page, url)
        broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"}
        page.set_input_files(".composer input[type=file]", broken)
        page.wait_for_selector(".thumb .chip:has-text('broken.png'):has-text('cannot be shown')")
        ask(page, "What is it?")
        page.wait_for_selector(".assistant .error:text-matches('^broken.png cannot be used: it ')")
        page.wait_for_selector(".user .chip:has-text('cannot be shown')")
        page.wait_for_selector(".user .note:has-text('not sent along')")
        ask(page, "Still there?")
        page.wait_for_selector(".assistant .text:has-text('Fine')")
        page.wait_for_selector(
            ".assistant .note:text-matches('^This prompt has [0-9]+ tokens; .* trained on 4[.]$')"
        )
        assert "What is it?" not in prompt_of(served, engine.requests[-1])
        page.locator("[aria-label='Edit and send again']").first.click()
        page.click(".editing [aria-label='Take broken.png away']")
        page.get_by_role("button", name="Send again", exact=True).click()
        page.wait_for_selector(".assistant .text:has-text('Fine')")
        assert page.locator(".messages :is(.chip, .error, .user .note)").count() == 0
        assert "What is it?" in prompt_of(served, engine.requests[-1])

"""The page in a real browser: each tab does its job on the embedded models."""

import json
import re
import threading
import time

import pytest

from tests.helpers import ROOT

ENDED = ".player[aria-busy=false]"
# Notes how many tokens stand there whenever that changes.
COUNT_TOKENS = """() => {
    window.counts = [];
    const look = () => {
        const count = document.querySelectorAll('.tokens .token').length;
        if (count && count !== window.counts.at(-1)) window.counts.push(count);
        requestAnimationFrame(look);
    };
    look();
}"""
# Goes to a part of all steps, and waits until that is on the screen.
SCRUB = """async (scrubber, part) => {
    scrubber.value = Math.round(Number(scrubber.max) * part);
    scrubber.dispatchEvent(new Event('input', { bubbles: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
}"""
STARTED = "def add(a, b):\n    "
UNHEALED = "def f(x):"  # no token begins with its end and goes on


def ask(page, tab, prompt=None, tokens=None):
    """Fill in the form of a tab, and send it."""
    panel = page.locator(f"#panel-{tab}")
    if prompt is not None:
        panel.get_by_label("Prompt", exact=True).fill(prompt)
    if tokens is not None:
        panel.get_by_label("Most tokens").fill(str(tokens))
    panel.locator("button.main").first.click()
    return panel


def choose(page, tab, model, method, **options):
    panel = page.locator(f"#panel-{tab}")
    panel.get_by_label("Model", exact=True).select_option(model)
    panel.get_by_label("Method", exact=True).select_option(method)
    for name, value in options.items():
        panel.locator("summary", has_text="Options of the method").click()
        panel.get_by_label(name, exact=True).fill(str(value))


def decode(page, model, method, tokens=20, prompt=STARTED, **options):
    choose(page, "watch", model, method, **options)
    panel = ask(page, "watch", prompt, tokens)
    panel.locator(ENDED).wait_for()
    return panel


def counter(panel, name):
    return panel.locator(".counters").locator(f"dt:text-is('{name}') + dd")


def test_tokens_arrive_one_by_one_and_can_be_asked_for_their_law(watched, picture):
    page = watched.open()
    choose(page, "watch", "zoo:ar", "speculative")
    page.evaluate(COUNT_TOKENS)
    panel = ask(page, "watch", "class Stack:\n    def __init__(self):\n", 64)
    panel.locator(ENDED).wait_for()
    counts = page.evaluate("() => window.counts")
    assert len(counts) > 4 and counts == sorted(counts)  # the first was seen before the last
    token = panel.locator(".tokens .r-accepted").first
    token.hover()
    card = panel.locator(".card")
    card.wait_for()
    assert "accepted in forward" in card.inner_text()
    assert card.locator("th[scope=col]").all_inner_texts() == ["token", "model", "p", "q"]
    assert panel.locator(".legend").inner_text().count("accepted") >= 1
    assert int(counter(panel, "forwards saved").inner_text()) > 0
    assert counter(panel, "acceptance").inner_text().endswith("%")
    picture(page, "watch")


def test_one_can_go_back_to_any_step(watched):
    page = watched.open()
    panel = decode(page, "zoo:ar", "lookup", tokens=16, prompt=UNHEALED)
    tokens = panel.locator(".tokens .token:visible")
    written = tokens.all_inner_texts()
    assert len(written) == int(counter(panel, "tokens").inner_text())
    panel.get_by_label("To the start").click()
    assert tokens.count() == 0 and panel.locator(".tokens .given").count() == 0
    panel.get_by_label("One forward on").click()
    assert 0 < tokens.count() < len(written)
    panel.get_by_label("To the end").click()
    assert tokens.all_inner_texts() == written
    panel.get_by_label("One forward back").click()
    assert tokens.count() < len(written)


def test_slowed_down_it_plays_on_to_the_end(watched):
    page = watched.open()
    panel = decode(page, "zoo:ar", "ar", tokens=6)
    panel.get_by_label("Speed").select_option("0.5")
    panel.get_by_label("Play", exact=True).click()
    panel.get_by_label("Pause").wait_for()
    panel.get_by_label("Play", exact=True).wait_for()  # it has stopped by itself
    assert counter(panel, "tokens").inner_text() == "6"


def test_a_masked_canvas_shows_its_blanks_and_how_sure_the_model_is(watched, picture):
    page = watched.open()
    panel = decode(page, "zoo:masked", "ssd", tokens=16, prompt=UNHEALED)
    assert panel.locator(".tokens .blank:visible").count() == 0  # all are decided
    panel.get_by_label("To the start").click()
    for _ in range(3):
        panel.get_by_label("One forward on").click()
    asked = panel.locator(".tokens .asked, .tokens .draft")
    assert asked.count() > 0 and panel.locator(".tokens .blank:visible").count() > 0
    scrubber = panel.get_by_label("Step")
    scrubber.fill("2")  # the first forward has answered, nothing is decided yet
    sure = panel.locator(".tokens .asked").first.evaluate("n => n.style.getPropertyValue('--sure')")
    assert 0 < float(sure) <= 1
    picture(page, "masked")


def test_routers_decisions_stand_at_the_margin(watched, picture):
    page = watched.open()
    panel = decode(page, "zoo:block", "s2d2", tokens=16)
    decisions = panel.locator(".margin li")
    assert decisions.count() > 0
    assert re.match(r"(verify|trust) forward \d+: run of \d+", decisions.first.inner_text())
    picture(page, "block")


def test_jacobi_shows_its_iterates_converge(watched, picture):
    page = watched.open()
    panel = decode(page, "zoo:consistency", "jacobi", tokens=24)
    rows = panel.locator(".iterates tbody tr")
    assert rows.count() == int(counter(panel, "forwards").inner_text()) or rows.count() == 16
    assert panel.locator(".iterates td.right").count() > 0
    picture(page, "jacobi")


def test_stop_frees_the_lane(watched, site):
    page = watched.open()
    choose(page, "watch", "zoo:ar", "ar")
    panel = ask(page, "watch", STARTED, 400)
    panel.locator(".tokens .token").first.wait_for()
    assert site.engine("zoo:ar").busy
    panel.get_by_role("button", name="Stop").click()
    panel.locator(ENDED).wait_for()
    assert site.settled("zoo:ar", 5)


def test_four_racers_end_with_identical_texts(watched, picture):
    page = watched.open("race")
    panel = ask(page, "race", STARTED, 24)
    panel.locator(".differences").wait_for()
    assert panel.locator(".panel").count() == 4
    assert panel.locator(".same").count() == 3 and panel.locator(".differs").count() == 0
    assert sorted(text[:3] for text in panel.locator(".place").all_inner_texts()) == [
        "1st",
        "2nd",
        "3rd",
        "4th",
    ]
    assert all(
        "exact; reference: ar" in text for text in panel.locator(".promise").all_inner_texts()
    )
    picture(page, "race")


def test_racers_that_differ_are_told_apart(watched):
    page = watched.open("race")
    panel = page.locator("#panel-race")
    for _ in range(2):
        panel.get_by_role("button", name="Remove").last.click()
    panel.get_by_label("Model", exact=True).nth(1).select_option("zoo:block")
    ask(page, "race", STARTED, 16)
    panel.locator(".differences").wait_for()
    assert "differs from ar after" in panel.locator(".differs").inner_text()


def test_holes_are_made_sized_and_filled(watched, picture):
    page = watched.open("fill")
    panel = page.locator("#panel-fill")
    text = panel.locator("textarea")
    text.fill("def mean(values):\n    total = sum(values)\n    return total\n")
    panel.locator(".word", has_text="sum(values)").click()
    assert "total = <|fill:4|>" in text.input_value()
    hole = panel.get_by_role("slider")
    hole.press("ArrowRight")
    assert "<|fill:5|>" in text.input_value()
    box = hole.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + 5 + 16, box["y"] + 5, steps=3)
    page.mouse.up()
    assert "<|fill:7|>" in text.input_value()
    panel.get_by_label("Hole 1, from").fill("5")
    panel.get_by_label("Hole 1, from").press("Tab")
    assert "<|fill:5-7|>" in text.input_value()
    ask(page, "fill")
    offered = panel.locator(".alternatives li")
    offered.first.wait_for()
    assert offered.count() == 3
    densities = [
        float(re.search(r"(\S+) per token", words)[1]) for words in offered.all_inner_texts()
    ]
    assert densities == sorted(densities, reverse=True)
    picture(page, "fill")
    best = offered.first.locator("mark").text_content()
    panel.get_by_role("button", name="Accept").first.click()
    assert text.input_value() == f"def mean(values):\n    total = {best}\n    return total\n"


def test_try_again_gives_another_seed(watched):
    page = watched.open("fill")
    panel = ask(page, "fill")
    panel.locator(".alternatives li").first.wait_for()
    panel.get_by_role("button", name="Try again").click()
    panel.locator(".alternatives li").first.wait_for()
    assert panel.get_by_label("Seed").input_value() == "1"


def test_one_can_chat_stop_and_ask_again(watched, site, picture):
    page = watched.open("chat")
    panel = page.locator("#panel-chat")
    panel.locator("summary", has_text="Model and method").click()
    panel.get_by_label("Most tokens").fill("400")
    panel.get_by_label("Message", exact=True).fill("def add(a, b):")
    panel.get_by_label("Message", exact=True).press("Enter")
    panel.locator(".said .assistant .token").first.wait_for()
    panel.get_by_role("button", name="Stop").click()
    panel.locator(ENDED).wait_for()
    assert site.settled("zoo:ar", 5)
    panel.get_by_label("Most tokens").fill("12")
    panel.get_by_role("button", name="Regenerate").click()
    panel.locator(ENDED).wait_for()
    assert panel.locator(".said > li").count() == 2
    assert int(counter(panel, "tokens").inner_text()) <= 12
    picture(page, "chat")
    panel.get_by_role("checkbox", name="Colours").uncheck()
    token = panel.locator(".said .assistant .token").first
    assert token.evaluate("n => getComputedStyle(n).backgroundColor") == "rgba(0, 0, 0, 0)"
    panel.get_by_label("Message", exact=True).fill("and now?")
    panel.get_by_role("button", name="Send").click()
    panel.locator(".said > li:nth-child(4)").wait_for()


def test_methods_are_compared_with_progress_and_a_plot(watched, picture):
    page = watched.open("prove")
    panel = page.get_by_label("Compare", exact=True)
    for box in panel.locator(".choices input").all():
        box.set_checked(box.input_value() in ("ar", "lookup", "speculative"))
    panel.get_by_label("Tokens each").fill("8")
    panel.get_by_label("Prompt").fill(STARTED)
    panel.get_by_role("button", name="Compare").click()
    table = panel.locator("table")
    table.wait_for()
    assert table.locator("tbody tr").count() == 3
    assert table.locator("tbody").inner_text().count("100 %") >= 3  # each equals its reference
    assert panel.locator("svg circle").count() == 3
    assert panel.locator("svg .frontier").get_attribute("points")
    picture(page, "prove")


def engines():
    """How many engines run in this process."""
    return sum(thread.name == "forerun-engine" for thread in threading.enumerate())


def test_a_comparison_can_be_cancelled(watched, site):
    page = watched.open("prove")
    before = engines()
    panel = page.get_by_label("Compare", exact=True)
    panel.get_by_label("Rounds").fill("10")
    panel.get_by_role("button", name="Compare").click()
    panel.locator("progress").wait_for()
    panel.get_by_role("button", name="Cancel").click()
    panel.locator("progress").wait_for(state="hidden")
    deadline = time.monotonic() + 10
    while site.server.models.served("zoo:ar").busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not site.server.models.served("zoo:ar").busy  # its place is free
    while engines() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engines() <= before  # and so is the engine that it ran on


def test_a_method_is_certified(watched):
    page = watched.open("prove")
    panel = page.get_by_label("Certify", exact=True)
    panel.get_by_label("Method", exact=True).select_option("ar")
    panel.get_by_role("button", name="Certify").click()
    panel.locator("b.holds").wait_for()
    assert panel.locator("tbody tr").count() > 0
    panel.get_by_label("How").select_option("test")
    panel.get_by_label("Most sequences").fill("3")
    panel.get_by_role("button", name="Certify").click()
    panel.locator("b.holds, b.undecided").wait_for()
    assert "chance that a fault" in panel.locator("caption").inner_text().lower()


def test_a_mistake_is_told_and_the_page_goes_on(watched):
    page = watched.open()
    choose(page, "watch", "zoo:ar", "jacobi", block="0")
    ask(page, "watch", STARTED, 4)
    assert "block=0" in page.get_by_role("alert").inner_text()
    watched.wrong.clear()  # the browser itself notes a status of 400
    page.get_by_label("block", exact=True).fill("4")
    ask(page, "watch", STARTED, 4).locator(f"{ENDED} .token").first.wait_for()
    assert page.get_by_role("alert").count() == 0


def long_trace(tokens, text=" word"):
    """A trace of so many tokens, each with its law."""
    lines = [
        {
            "kind": "start",
            "method": "speculative",
            "model": "m",
            "family": "causal",
            "guarantee": "exact",
            "reference": "ar",
            "tokens": [1, *[None] * tokens],
            "texts": ["x", *[""] * tokens],
        }
    ]
    for i in range(0, tokens, 5):
        forward = i // 5 + 1
        places = list(range(i + 1, i + 6))
        lines.append(
            {
                "kind": "draft",
                "time": forward * 0.01,
                "forward": forward,
                "positions": places,
                "tokens": [7] * 5,
                "texts": [text] * 5,
                "q": [0.5] * 5,
            }
        )
        law = {"tokens": [7, 8], "texts": [text, "b"], "model": [0.6, 0.1], "p": [1, 0]}
        lines.append(
            {
                "kind": "commit",
                "time": forward * 0.01,
                "forward": forward,
                "reason": "accepted",
                "positions": places,
                "tokens": [7] * 5,
                "texts": [text] * 5,
                "drafted": [7] * 5,
                "rejected": [],
                "laws": [{**law, "q": [0.5, 0.1], "drafted": 7}] * 5,
            }
        )
    return lines


def written(folder, lines):
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def replay(page, file):
    page.get_by_label("Trace file").set_input_files(file)
    panel = page.locator("#panel-replay")
    panel.locator(".player").wait_for()
    return panel


def test_five_thousand_tokens_scrub_without_a_dropped_second(watched, tmp_path):
    page = watched.open("replay")
    panel = replay(page, written(tmp_path, long_trace(5000)))
    scrubber = panel.get_by_label("Step")
    session = page.context.new_cdp_session(page)
    # The page's own time: others may use this machine too.
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy():
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    took = []
    for part in (1, 0, 0.5, 1, 0.1, 0.9, 0.3, 0.31, 0, 1):
        before = busy()
        scrubber.evaluate(SCRUB, part)
        took.append(busy() - before)
    assert panel.locator(".tokens .token:visible").count() == 5000
    assert 0 < max(took) < 1


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "\u202etxet\u202c",
    "\x1b]0;title\x07\x1b[2J",
    "{{POLICY}}${alert(3)}`",
    "שלום",
]


def hostile_trace():
    lines = []
    for i, text in enumerate([*HOSTILE, "z" * 10_000_000]):
        law = {"tokens": [1], "texts": [text], "model": [1], "p": [1], "q": [None], "drafted": None}
        line = {"forward": i + 1, "reason": text[:60], "tokens": [1], "texts": [text]}
        lines.append({**line, "positions": [i], "rejected": [2], "rejected_texts": [text]})
        lines[-1] |= {"laws": [law], "drafted": [1, 2]}
    return lines


def test_hostile_text_stays_text(watched, tmp_path):
    page = watched.open("replay")
    panel = replay(page, written(tmp_path, hostile_trace()))
    panel.get_by_label("To the end").click()
    tokens = panel.locator(".tokens .token")
    assert tokens.count() == len(HOSTILE) + 1
    assert tokens.first.evaluate("n => n.lastChild.textContent") == HOSTILE[0]
    tokens.first.hover()
    assert HOSTILE[0] in panel.locator(".card").inner_text()
    everything = panel.locator(".tokens").inner_text()
    assert "\u202e" not in everything and "\\u202e" in everything and "\x1b" not in everything
    assert len(everything) < 5000 and "10,000,000 characters" in everything
    assert page.locator("main img, main script, main iframe").count() == 0


@pytest.mark.parametrize("content", ["", "no json", "[1]", '{"kind": "commit"}', '{"tokens": "x"}'])
def test_a_file_that_is_no_trace_is_refused_with_its_line(watched, tmp_path, content):
    page = watched.open("replay")
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    page.get_by_label("Trace file").set_input_files(file)
    page.get_by_role("alert").wait_for()
    assert page.get_by_role("alert").inner_text().startswith("bad.jsonl: ")


def test_a_trace_can_be_dropped_anywhere(watched):
    page = watched.open()
    text = "".join(json.dumps(line) + "\n" for line in long_trace(10))
    data = page.evaluate_handle(
        """(text) => {
            const data = new DataTransfer();
            data.items.add(new File([text], 't.jsonl'));
            return data;
        }""",
        text,
    )
    page.dispatch_event("main", "drop", {"dataTransfer": data})
    panel = page.locator("#panel-replay")
    panel.get_by_label("To the end").click()
    assert panel.locator(".tokens .token").count() == 10


def test_a_replay_of_the_gallery_plays(watched, picture):
    page = watched.open("replay")
    panel = replay(page, ROOT / "docs" / "gallery" / "specdiff.html")
    for _ in range(6):
        panel.get_by_label("One forward on").click()
    assert panel.locator(".tokens .r-accepted").count() > 0
    picture(page, "replay")


def test_a_run_is_saved_as_a_trace_and_as_a_page_that_plays_alone(watched, tmp_path):
    page = watched.open()
    panel = decode(page, "zoo:ar", "lookup", tokens=12, prompt="x = '</script><b>'\n")
    shown = panel.locator(".tokens .token").all_inner_texts()
    with page.expect_download() as saving:
        panel.get_by_label("Save the trace as a file").click()
    trace = tmp_path / "t.jsonl"
    saving.value.save_as(trace)
    kinds = [json.loads(line)["kind"] for line in trace.read_text().splitlines()]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("commit") > 0
    with page.expect_download() as saving:
        panel.get_by_label("Save as one HTML file").click()
    alone = tmp_path / "replay.html"
    saving.value.save_as(alone)
    page.goto(f"file://{alone}")
    page.get_by_label("To the end").click()
    assert page.locator(".tokens .token").all_inner_texts() == shown
    assert "lookup on zoo:ar" in page.locator("h3").first.inner_text()


def test_the_page_is_small_and_soon_there(watched):
    sizes = {}
    watched.page.on("response", lambda response: sizes.update({response.url: len(response.body())}))
    paints = []
    for _ in range(3):
        page = watched.open()
        paints.append(
            page.evaluate(
                "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
            )
        )
    assert sum(sizes.values()) < 150_000
    assert min(paints) < 1000


def test_everything_is_reached_with_the_keyboard(watched):
    page = watched.open()
    panel = decode(page, "zoo:ar", "ar", tokens=5)
    tokens = panel.get_by_role("listbox")
    tokens.focus()
    tokens.press("End")
    assert "sampled in forward" in panel.locator(".card").inner_text()
    active = tokens.get_attribute("aria-activedescendant")
    tokens.press("ArrowLeft")
    assert tokens.get_attribute("aria-activedescendant") != active
    page.get_by_role("tab", name="Watch").press("ArrowRight")
    assert page.get_by_role("tab", name="Race").get_attribute("aria-selected") == "true"
    assert page.evaluate("() => document.activeElement.id") == "tab-race"
    page.get_by_role("tab", name="Race").press("End")
    assert page.locator("#panel-replay").is_visible()


def test_axe_finds_no_violation(watched, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core here")
    found = {}

    def look(tab):
        page.locator(f"#tab-{tab}").click()
        found[tab, len(found)] = axe.Axe().run(page)

    page = watched.open()
    decode(page, "zoo:block", "s2d2", tokens=12)
    page.get_by_label("One forward back").click()
    page.locator(".tokens .token").first.hover()
    for tab in ("watch", "race", "fill", "chat", "prove"):
        look(tab)
    page.emulate_media(color_scheme="dark")
    look("watch")
    page.locator("#tab-replay").click()
    replay(page, written(tmp_path, long_trace(20)))
    page.get_by_label("To the end").last.click()
    look("replay")
    assert len(found) == 7
    violations = [one.generate_report() for one in found.values() if one.violations_count]
    assert not violations, "\n".join(violations)


def test_it_fits_a_phone(watched, picture):
    page = watched.page
    page.set_viewport_size({"width": 360, "height": 740})
    watched.open()
    decode(page, "zoo:consistency", "jacobi", tokens=12)
    for tab in ("watch", "race", "fill", "chat", "prove", "replay"):
        page.locator(f"#tab-{tab}").click()
        wide = page.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= 360, f"{tab} is {wide} pixels wide"
    page.locator("#tab-watch").click()
    picture(page, "phone")

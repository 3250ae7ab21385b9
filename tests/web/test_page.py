"""The page in a real browser: by mouse, by keyboard, on a telephone, in the dark."""

import re
import time
import tomllib
from itertools import pairwise

import pytest

from .conftest import NARROW, WIDE

SMALL = "model=llama3-8b&cluster=8xh100&batch=64"
PIPELINE = f"{SMALL}&pp=4&zero=1&recompute=full"
BAD = f"{SMALL}&micro_batch=8"


def set_slider(seen, name, value):
    """To a value that it offers, as a drag would."""
    seen.page.evaluate(
        """([id, value]) => {
            const slider = document.getElementById(id), output = slider.parentElement.querySelector("output");
            for (let i = 0; i <= slider.max; i++) {
                slider.value = i;
                slider.dispatchEvent(new Event("input"));
                if (output.textContent === value) return;
            }
            throw new Error(`${id} does not offer ${value}`);
        }""",
        [name, value],
    )
    seen.settle()


@pytest.mark.parametrize(("name", "viewport"), [("wide", WIDE), ("narrow", NARROW)])
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_the_whole_page_fits_its_width(visit, name, viewport, scheme):
    seen = visit(viewport, color_scheme=scheme)
    seen.open("model=llama3-70b&cluster=16x8xh100&tp=8&pp=4&zero=1&schedule=interleaved&batch=256&a=tp%3D8")
    for panel in ("tiles", "memory", "timeline", "step", "communication", "compare", "notes"):
        assert seen.page.is_visible(f"#{panel}"), panel
    assert seen.page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    assert seen.page.locator(".picture rect").count() > 50
    assert seen.page.locator("#memory .bar.large .part").count() >= 6
    seen.picture(f"page-{name}-{scheme}")
    seen.picture(f"page-{name}-{scheme}-whole", whole=True)


def test_a_slider_changes_the_plan_and_the_link(visit):
    seen = visit()
    seen.open(SMALL)
    before = seen.text("#tile-step dd:nth-of-type(1)")
    set_slider(seen, "tp", "8")
    assert "tp=8" in seen.page.url
    assert seen.text("#tile-step dd:nth-of-type(1)") != before
    assert "tp 8" in seen.text("#subtitle")
    assert "tensor parallel" in seen.text("#communication")


def test_only_the_last_of_many_moves_is_shown(visit):
    """Also where answers are slow: those of older settings neither come back nor put the slider back."""
    seen = visit()
    seen.open(SMALL)

    def slowly(route):
        time.sleep(0.15)
        route.continue_()

    seen.page.route("**/api/plan**", slowly)
    slider = seen.page.locator("#micro_batch")
    slider.focus()
    for key in ["ArrowRight"] * 3 + ["ArrowLeft"] * 2 + ["ArrowRight"] * 2:
        slider.press(key)
        seen.page.wait_for_timeout(30)
    seen.settle()
    assert seen.text(".control:has(#micro_batch) output") == "8"
    assert "micro_batch=8" in seen.page.url


def test_moves_within_a_moment_are_one_question(visit):
    seen = visit()
    seen.open(SMALL)
    asked = len(seen.requests)
    set_slider(seen, "micro_batch", "8")  # passes 1, 2 and 4
    assert len([url for url in seen.requests[asked:] if "/api/plan" in url]) == 1


def test_a_link_restores_what_was_seen(visit):
    seen = visit()
    seen.open(SMALL)
    set_slider(seen, "pp", "4")
    seen.page.select_option("#schedule", "zb_v")
    seen.settle()
    again = visit()
    again.page.goto(seen.page.url)
    again.settle()
    for selector in ("#title", "#subtitle", "#tiles", "#memory", "#timeline .bar-head"):
        assert again.text(selector) == seen.text(selector), selector
    assert again.page.input_value("#schedule") == "zb_v"
    assert again.page.input_value("#zero") == "1"  # moved along with the schedule, and is in the link


def test_the_keyboard_alone_reaches_another_plan(visit):
    seen = visit()
    seen.open(SMALL)
    page, reached = seen.page, []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
        if reached[-1] == "tp":
            break
    assert "tp" in reached and {"pin", "copy", "model", "best"} <= set(reached)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    seen.settle()
    assert "tp=2" in page.url
    assert page.evaluate("document.activeElement.id") == "tp"  # an answer takes nobody's focus
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") != "tp"  # no trap
    page.wait_for_selector("#live:has-text('MFU')", state="attached")  # for those who listen


def test_every_control_has_a_name(visit):
    seen = visit()
    seen.open(PIPELINE)
    nameless = seen.page.evaluate(
        """[...document.querySelectorAll("input, select, button, a, [role=img]")].filter((element) => {
            const label = element.labels?.length ? element.labels[0].textContent : "";
            return !(label || element.textContent || element.getAttribute("aria-label") || "").trim();
        }).map((element) => element.outerHTML)"""
    )
    assert nameless == []
    levels = seen.page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1 and all(after <= before + 1 for before, after in pairwise(levels))


def test_what_does_not_fit_is_mended_by_a_button(visit):
    seen = visit()
    seen.open(BAD)
    seen.page.wait_for_selector(".fixes button")
    assert "does not fit" in seen.text("#strip")
    seen.picture("page-does-not-fit")
    seen.page.click(".fixes li:first-child button")
    seen.settle()
    assert re.match("fits", seen.text("#strip b"))
    assert seen.page.locator(".fixes").count() == 0


def test_an_illegal_layout_in_a_link_is_explained(visit):
    seen = visit()
    seen.open("model=llama3-8b&cluster=8xh100&batch=3&tp=4")
    assert "3 is not micro_batch 1" in seen.text("#trouble")
    assert not seen.page.is_visible("#memory-panel")


def test_a_wrong_word_in_a_field_is_blamed_where_it_stands(visit):
    seen = visit()
    seen.open(SMALL)
    seen.page.fill("#tokens", "1.5TB")
    seen.page.press("#tokens", "Enter")
    seen.page.wait_for_selector("#tokens[aria-invalid=true]")
    assert "these are bytes" in seen.text("#trouble [role=alert]")
    seen.page.fill("#tokens", "1.5T")
    seen.page.press("#tokens", "Enter")
    seen.page.wait_for_selector("#tokens[aria-invalid=false]")
    seen.settle()
    assert "tokens=1500000000000" in seen.page.url
    assert seen.page.input_value("#tokens") == "1.5T"
    assert [text for text in seen.complaints if "400" in text]
    seen.complaints.clear()  # the browser itself logs an answer of status 400


def test_the_best_layout_is_found_and_taken(visit):
    seen = visit()
    seen.open(f"{SMALL}&micro_batch=8")
    seen.page.click("#best")
    seen.page.wait_for_selector("#search tbody tr", timeout=60_000)
    seen.settle()
    assert re.match("fits", seen.text("#strip b"))
    assert seen.page.locator("#search tbody tr").count() > 1
    taken = seen.page.url
    seen.page.click("#search tbody tr:nth-child(2) button")
    seen.settle()
    assert seen.page.url != taken
    seen.picture("page-best", whole=True)


def test_a_search_leaves_alone_what_is_to_be_kept(visit):
    seen = visit()
    seen.open(f"{SMALL}&tp=4")
    seen.page.click("#keep summary")
    seen.page.check("#keep input[value=tp]")
    seen.page.click("#best")
    seen.page.wait_for_selector("#search tbody tr", timeout=60_000)
    layouts = seen.page.locator("#search tbody th").all_inner_texts()
    assert layouts and all("tp 4" in layout for layout in layouts)


@pytest.mark.slow
def test_two_plans_beside_each_other(visit):
    seen = visit()
    seen.open(f"{SMALL}&recompute=full")
    seen.page.click("#pin")
    set_slider(seen, "tp", "4")
    seen.page.wait_for_selector("#compare tbody tr")
    assert "tp 4" in seen.text("#compare")
    assert "a=" in seen.page.url
    again = visit()
    again.page.goto(seen.page.url)
    again.page.wait_for_selector("#compare tbody tr")
    assert again.text("#compare") == seen.text("#compare")
    seen.page.click("text=Go back to A")
    seen.settle()
    assert "tp=4" not in seen.page.url.partition("&a=")[0]


def test_the_run_file_is_the_servers_and_passes_check(visit, tmp_path, address):
    seen = visit()
    seen.open(PIPELINE)
    with seen.page.expect_download() as download:
        seen.page.click("#download")
    file = tmp_path / "run.toml"
    download.value.save_as(file)
    assert download.value.suggested_filename == "run.toml"
    served = seen.page.request.get(f"{address}/api/run.toml?{seen.page.url.partition('?')[2]}").text()
    assert file.read_text(encoding="utf-8") == served
    assert tomllib.loads(served)["parallel"]["pp"] == 4

    from ingot.planner.request.clusters import load_cluster
    from ingot.planner.run.check import check_run

    findings = check_run(file, load_cluster("8xh100"), cores=64)
    assert not [found for found in findings if found.severity == "error" and not found.missing_here]


@pytest.mark.slow
def test_the_pipeline_can_be_looked_at_closely(visit):
    seen = visit()
    seen.open(PIPELINE)
    assert seen.page.is_visible("#timeline-panel")
    assert seen.page.get_attribute(".picture svg", "aria-label")
    whole = seen.page.locator(".picture rect").count()
    seen.page.click("text=its start")
    seen.page.wait_for_selector(".picture[data-window=start] text.on")
    assert seen.page.locator(".picture rect").count() != whole
    assert seen.page.locator(".picture text.on").count() > 10
    seen.picture("page-timeline-start")
    set_slider(seen, "pp", "1")
    assert not seen.page.is_visible("#timeline-panel")


def test_nothing_moves_for_those_who_want_it_still(visit):
    seen = visit(reduced_motion="reduce")
    seen.open(SMALL)
    moving = seen.page.evaluate(
        """[...document.querySelectorAll("*")].filter((element) => {
            const style = getComputedStyle(element);
            return parseFloat(style.transitionDuration) > 0 || parseFloat(style.animationDuration) > 0;
        }).length"""
    )
    assert moving == 0


def test_a_server_that_is_gone_is_told(visit):
    seen = visit()
    seen.open(SMALL)
    seen.page.route("**/api/plan**", lambda route: route.abort())
    seen.page.select_option("#recompute", "full")
    seen.page.wait_for_selector("#trouble [role=alert]")
    assert "does not answer" in seen.text("#trouble")
    seen.complaints.clear()  # of the request that was cut


@pytest.mark.slow
def test_no_control_of_a_telephone_is_too_small_to_touch(visit):
    seen = visit(NARROW, has_touch=True, is_mobile=True)
    seen.open(PIPELINE)
    small = seen.page.evaluate(
        """[...document.querySelectorAll("form :is(input, select, button), .boxes label, .actions > *")]
            .filter((element) => element.type !== "checkbox")
            .filter((element) => element.offsetParent && element.getBoundingClientRect().height < 28)
            .map((element) => element.id)"""
    )
    assert small == []
    assert float(seen.page.evaluate("getComputedStyle(document.getElementById('seq')).fontSize.slice(0, -2)")) >= 16

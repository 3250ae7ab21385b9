"""Layouts found in a process of their own."""

import anyio
import pytest
from tests.expect import refused

from ingot.planner.web import answers, searching
from ingot.planner.web.settings import PageSettings, read_settings


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_the_best_layouts_fit_and_can_be_taken(anyio_backend):
    asked = PageSettings(model="llama3-8b", cluster="8xh100", batch=256)
    found = await searching.best_layouts(asked)
    assert found["best"]
    state = answers.settled(read_settings(found["best"][0]["words"].items()))
    plan = answers.answer(state).plan
    assert plan is not None
    assert plan.total_memory_bytes <= plan.cluster.memory_bytes
    assert state.tokens == answers.settled(asked).tokens
    assert "tokens" not in found["best"][0]["words"]  # what was left open stays so


@pytest.mark.anyio
async def test_a_search_that_takes_too_long_is_stopped(anyio_backend):
    with anyio.fail_after(120), refused("E-SEARCH-DEADLINE", deadline_seconds=0.05):
        await searching.best_layouts(PageSettings(), deadline_seconds=0.05)


@pytest.mark.anyio
async def test_a_search_ends_with_the_page_that_asked_for_it(anyio_backend):
    with anyio.move_on_after(0.05) as scope:
        await searching.best_layouts(PageSettings())
    assert scope.cancelled_caught


def test_what_is_kept_stays_as_it_is(client):
    found = client.get(
        "/api/search?model=llama3-8b&cluster=8xh100&batch=256&tp=4&recompute=full&keep=tp,recompute"
    ).json()
    assert found["best"]
    for one in found["best"]:
        assert (one["words"]["tp"], one["words"]["recompute"]) == ("4", "full")
    refused = client.get("/api/search?keep=model")
    assert refused.status_code == 400
    assert "cannot keep 'model'" in refused.json()["found"]


def test_where_nothing_fits_the_nearest_and_a_way_out_are_told(client):
    found = client.get("/api/search?model=llama3-70b&cluster=h100&batch=64").json()
    assert found["best"] == []
    assert found["fix"]


def test_bad_settings_are_refused_before_a_process_is_started(client, monkeypatch):
    async def never(state, keep):
        raise AssertionError("a process was started")

    monkeypatch.setattr("ingot.planner.web.app.best_layouts", never)
    assert client.get("/api/search?model=nobody").status_code == 400


def test_searches_that_would_crowd_out_others_are_refused(client, monkeypatch):
    monkeypatch.setattr("ingot.planner.web.app._MOST_SEARCHES", 0)
    refused = client.get("/api/search?cluster=8xh100")
    assert refused.status_code == 503 and "searches are running" in refused.json()["found"]


@pytest.mark.anyio
async def test_a_layout_that_lives_on_the_host_fits_on_the_page_as_in_the_search(anyio_backend):
    """70B on eight devices: parameters and optimizer state are offloaded, and both have to come along."""
    found = await searching.best_layouts(PageSettings(model="llama3-70b", cluster="8xh100"))
    for best in found["best"]:
        state = answers.settled(read_settings(best["words"].items()))
        plan = answers.answer(state).plan
        assert plan is not None and plan.total_memory_bytes <= plan.cluster.memory_bytes, best["rest"]
    assert any("parameters offloaded" in best["rest"] for best in found["best"])

import json
import multiprocessing
import os
import resource
import time
from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.data.sources import fetch as fetching
from ingot.data.sources.fetch import fetch, forget, host_connection, version
from ingot.data.sources.remote import RemoteRules, Version
from ingot.data.sources.web import _retry_after

DATA = os.urandom(3 << 20)


@pytest.fixture
def get(site, tmp_path):
    site.files["/f"] = DATA
    return lambda rules=None, **more: fetch(f"{site.url}/f", tmp_path, rules or site.rules, **more).read_bytes()


def test_whole_file_once(site, get, tmp_path):
    assert get() == DATA and get() == DATA
    assert len(site.requests) == 1
    assert site.seen("User-Agent")[0].startswith("ingot/") and site.seen("Accept-Encoding") == ["identity"]
    forget(f"{site.url}/f", tmp_path)
    assert get() == DATA and len(site.requests) == 2


@pytest.mark.parametrize(
    "faults",
    [
        ["cut"],
        ["cut", "cut", "cut"],
        [503, "cut", 500, 429],
        ["cut", "no-ranges"],
        ["cut", "off-by-one"],
        ["cut", 416],
        ["cut", "chunked"],
        ["chunked"],
        [(503, {"Retry_After": "0"}), (429, {"Retry_After": "soon"})],
        [408, 502, 504],
    ],
)
def test_faults_cost_time_only(site, get, faults):
    site.faults["/f"] = list(faults)
    assert get() == DATA
    assert not site.faults["/f"]


def test_a_cut_download_goes_on_where_it_stopped(site, get):
    site.faults["/f"] = ["cut"]
    get()
    ranges = site.seen("Range")
    assert ranges[0] is None and ranges[1] == f"bytes={len(DATA) // 2}-"
    assert site.seen("If-Range")[1].startswith('"')


def test_also_in_another_process(site, get):
    site.faults["/f"] = ["cut"] + [500] * 99
    with refused("E-REMOTE-UNREACHABLE"):
        get(site.rules)
    site.faults["/f"] = []
    assert get() == DATA and site.seen("Range")[-1] == f"bytes={len(DATA) // 2}-"


def test_a_file_that_changes_is_fetched_anew(site, get):
    site.faults["/f"] = ["cut"] + [500] * 99
    with refused("E-REMOTE-UNREACHABLE"):
        get()
    site.faults["/f"] = []
    site.files["/f"] = DATA[::-1]
    assert get() == DATA[::-1]


def test_a_change_is_seen_without_validators_by_its_length(site, get):
    site.etags = False
    site.faults["/f"] = ["cut"] + [500] * 99
    with refused("E-REMOTE-UNREACHABLE"):
        get()
    site.faults["/f"] = []
    site.files["/f"] = DATA[:-7]
    assert get() == DATA[:-7]


def test_progress_is_success_enough(site, get):
    """More cuts than attempts, but each of the first ones brings a megabyte."""
    site.files["/f"] = data = os.urandom(24 << 20)
    site.faults["/f"] = ["cut"] * 4
    assert get(replace(site.rules, attempts=2)) == data


def test_what_nobody_can_have_fails_at_once(site, get, tmp_path):
    for status, cause in ((404, "MISSING"), (410, "MISSING"), (401, "FORBIDDEN"), (400, "STATUS")):
        site.faults["/f"] = [status] * 9
        with refused(f"E-REMOTE-{cause}", status=status):
            get()
        assert len(site.faults["/f"]) == 8


def test_common_crawls_403_means_patience(site, get):
    site.faults["/f"] = [403, 403]
    assert get() == DATA


def test_other_403s_are_final(site, get):
    site.faults["/f"] = [403, 403]
    with refused("E-REMOTE-FORBIDDEN", status=403):
        get(replace(site.rules, common_crawl="s3://elsewhere"))
    assert len(site.faults["/f"]) == 1


def test_size_limit_with_and_without_a_content_length(site, get):
    with refused("E-REMOTE-SIZE", max_bytes=1000):
        get(replace(site.rules, max_bytes=1000))
    site.faults["/f"] = ["chunked"]
    with refused("E-REMOTE-SIZE", max_bytes=1000):
        get(replace(site.rules, max_bytes=1000))


def test_silence_has_an_end(site, get):
    site.faults["/f"] = ["silent"]  # until the end of the test
    assert get(replace(site.rules, timeout_seconds=1)) == DATA
    assert len([path for method, path, _ in site.requests if method == "GET" and path == "/f"]) >= 2
    site.silence.set()


def test_version_and_what_is_expected_of_it(site, get, tmp_path):
    url = f"{site.url}/f"
    get()
    found = version(url, tmp_path, site.rules)
    assert found.bytes == len(DATA) and found.etag
    assert get(expected=found) == DATA
    site.files["/f"] = b"other"
    assert get(expected=found) == DATA  # from the cache
    forget(url, tmp_path)
    with refused("E-REMOTE-CHANGED"):
        get(expected=found)
    assert get(expected=version(url, tmp_path, site.rules)) == b"other"
    now = Version(5, '"new"', "")
    with refused("E-REMOTE-CHANGED"):
        get(expected=now)


def test_servers_without_head(site, get, tmp_path):
    site.knows_head = False
    assert version(f"{site.url}/f", tmp_path, site.rules).bytes == len(DATA)
    assert site.seen("Range") == ["bytes=0-0"]


def test_full_disk_is_reported_and_the_bytes_so_far_are_kept(site, get):
    """A limit on the size of files stands for the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with refused("E-CACHE-WRITE"):
            get()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert get() == DATA and site.seen("Range")[-1] == f"bytes={1 << 20}-"


def test_pauses_grow_and_servers_are_obeyed(site, get, monkeypatch):
    pauses = []
    monkeypatch.setattr(fetching, "_sleep", pauses.append)
    site.faults["/f"] = [500, 500, 500, 500, (503, {"Retry_After": "77"})]
    get(replace(site.rules, backoff_seconds=1.0))
    assert all(0.5 * 2**n <= pause <= 2**n for n, pause in enumerate(pauses[:4])) and pauses[4] == 77


def test_retry_after():
    assert _retry_after("120") == 120 and _retry_after("99999999") == 600
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0 and _retry_after("nonsense") == _retry_after("") == 0
    assert 0 < _retry_after(time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))) <= 60


def _fetch_in_child(url, cache, rules, start):
    start.wait()
    fetch(url, cache, rules)


def test_workers_share_the_connections_to_a_host(site, tmp_path):
    for number in range(4):
        site.files[f"/{number}"] = DATA
    context = multiprocessing.get_context("fork")
    for connections in (1, 2):
        rules = replace(site.rules, connections=connections)
        start = context.Event()
        cache = tmp_path / str(connections)
        children = [
            context.Process(target=_fetch_in_child, args=(f"{site.url}/{n}", cache, rules, start)) for n in range(4)
        ]
        for child in children:
            child.start()
        site.busiest = 0
        start.set()
        for child in children:
            child.join(20)
            assert child.exitcode == 0
        assert 1 <= site.busiest <= connections


def test_requests_keep_their_distance(tmp_path):
    rules = RemoteRules(delay_seconds=0.2)
    started = time.monotonic()
    for _ in range(3):
        with host_connection("a.example", tmp_path, rules):
            pass
    assert time.monotonic() - started > 0.35
    with host_connection("", tmp_path, rules), host_connection("", tmp_path, rules):
        pass


def test_damaged_notes_of_an_earlier_try(site, get, tmp_path):
    site.faults["/f"] = ["cut"] + [500] * 99
    with refused("E-REMOTE-UNREACHABLE"):
        get()
    (facts,) = tmp_path.glob("*/version.json")
    assert json.loads(facts.read_text())["bytes"] == len(DATA)
    facts.write_text("{")
    site.faults["/f"] = []
    assert get() == DATA

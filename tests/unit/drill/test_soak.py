"""A soak's times, its share of useful time, and the growth of processes."""

import json
import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.expect import refused
from tests.own_time import own_time

from ingot.drill import leaks, soak
from ingot.drill.faults import FAULTS
from ingot.drill.leaks import Growth
from ingot.drill.plan import PlannedFault
from ingot.drill.soak import Soak, soak_lines, soak_times, useful_seconds
from ingot.drill.trial import Silence
from ingot.schema.quarantine_record import Quarantined, write_quarantine
from ingot.schema.run_folder import RunFolder

REFERENCE = SimpleNamespace(run=None, facts=SimpleNamespace(untrained=frozenset()))


def test_durations_and_times_between_faults():
    assert soak_times(None, None) is None
    assert soak_times("1h", None) == (3600.0, 20.0)
    assert soak_times("10min", "10s") == (600.0, 10.0)
    for duration, every in ((None, "10s"), ("10s", "20s"), ("1h", "0.5s"), ("soon", None), ("1h", "often")):
        with refused("E-DRILL-SOAK"):
            soak_times(duration, every)


def test_each_kept_step_counts_once_with_the_median_time(tmp_path):
    folder = RunFolder(tmp_path)
    begun, step = {"kind": "run_started", "from_step": 0}, {"kind": "step"}
    times = [
        (begun, 0.0),
        (step, 5.0),
        (step, 6.0),
        (step, 7.0),
        (begun, 20.0),
        (step, 25.0),
        (step, 26.0),
        (step, 40.0),
    ]
    folder.events.write_text("".join(json.dumps(event | {"time": at}) + "\n" for event, at in times))
    assert useful_seconds(folder, 4) == 4.0
    assert useful_seconds(RunFolder(tmp_path / "none"), 4) == 0.0


def test_memory_has_one_slope_over_all_lives():
    growth = Growth()
    for process, start in (("a", 50e6), ("b", 90e6)):
        for second in range(40):
            growth.add(process, second, round(start + second * 1e4), 10, 0)
    assert growth.memory_slope() == pytest.approx(0.6e6)
    assert growth.problem() == ""
    for second in range(40):
        growth.add("c", second, round(10e6 + second * 6e4), 10, 0)
    assert "memory grows by 1.60 MB per minute" in growth.problem()


def test_a_round_has_one_of_the_faults_that_need_their_own_settings_until_its_damage_is_repaired():
    session = Soak(REFERENCE, FAULTS, Silence(), seconds=60.0, every=5.0, seed=1)
    drawn, repaired = session._drawn(), []
    assert len(drawn) == len(FAULTS) - 1 and [one.id[:4] for one in drawn if one.one_of] == ["RS25"]
    stops = replace(next(one for one in FAULTS if one.id == "RS25"), repair=repaired.append)
    session._unrepaired = [stops]
    session._repair("trial", -9)
    assert session._unrepaired == [stops] and not repaired  # a killed command has not read the damage yet
    session._repair("trial", *stops.codes)
    assert session._unrepaired == [] and repaired == ["trial"]
    leaves_out = next(one for one in FAULTS if one.id == "RS25 quarantine")
    assert leaves_out.may_end == stops.codes and not leaves_out.codes


def test_a_copy_that_trained_otherwise_is_compared_with_one_that_is_directed_to(tmp_path, monkeypatch):
    session, folder = Soak(REFERENCE, FAULTS, Silence(), seconds=60.0, every=5.0, seed=1), RunFolder(tmp_path)
    facts = {"untrained": frozenset()}
    monkeypatch.setattr(soak, "read_facts", lambda folder: SimpleNamespace(**facts))
    monkeypatch.setattr(soak, "directed_to_skip", lambda trial, record: ("directed", record))
    planned = [PlannedFault(kind="flip"), PlannedFault(kind="still")]

    def expected(*started):
        plan = SimpleNamespace(faults=lambda: planned, starts=lambda: dict.fromkeys(started, 3))
        return session._expected(SimpleNamespace(plan=plan, folder=folder))

    assert expected() == expected(0) == (REFERENCE.facts, None)
    assert expected(0, 1) == (("directed", ()), 3)
    facts["untrained"] = frozenset({4})
    assert expected(0) == (("directed", ()), 4)
    facts["untrained"] = frozenset()
    record = (Quarantined(step=3, shard="a", blocks_sha256="0" * 64, begin=0, end=8, code="E-SHARD-HASH"),)
    write_quarantine(folder.quarantine, record)
    assert expected() == (("directed", record), 3)


def test_short_lives_have_no_slope():
    growth = Growth()
    for second in range(20):
        growth.add("a", second, second * 10**9, 10, 0)
    assert growth.memory_slope() is None and growth.problem() == ""


@pytest.mark.parametrize(("column", "most", "problem"), [(0, 2, "3 more files"), (1, 0, "1 more sockets")])
def test_files_and_sockets_may_be_open_for_moments(column, most, problem):
    def grown(by):
        growth = Growth()
        for second in range(16):
            counts = [10, 1]
            counts[column] += 9 if second == 14 else by if second >= 8 else -(second == 3)
            growth.add("a", second, 10**6, *counts)
        return growth

    assert grown(most).problem() == ""
    assert problem in grown(most + 1).problem()


def test_a_process_is_sampled(monkeypatch):
    monkeypatch.setattr(leaks, "_WARM_SECONDS", 0.0)
    seconds = iter(range(100, 200, 2))
    own_time(monkeypatch, leaks, monotonic=lambda: next(seconds))
    growth, sockets = Growth(), []
    for number in range(16):
        if number >= 8:
            sockets.append(socket.create_server(("127.0.0.1", 0)))
        growth.sample(os.getpid(), 2**22 + 1)  # the second one is no process
    assert growth.files() >= 4 and growth.ports() >= 4
    for one in sockets:
        one.close()


def test_the_result_is_shown():
    line = {
        "faults": {"RS01": 2, "RS08": 1},
        "rounds": 2,
        "detect_s": 0.1,
        "recover_s": None,
        "wrong": ["o1: x"],
        "useful_share": 0.75,
        "memory_mb_per_minute": None,
        "more_open_files": 1,
        "more_listening_sockets": 0,
    }
    shown = "\n".join(soak_lines({"rows": [line], "red": ["RS34"], "seconds": 60.0}))
    assert "3 in 2 copies: RS01 2, RS08 1" in shown and "75%" in shown and "o1: x" in shown and "RED" in shown

"""Logs as no run should write them, through `ingot alerts --replay` and the feed: nothing ends, and little is kept."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from random import Random

import pytest
from tests.unit.observe.conftest import HOSTILE, START, run_of
from tests.unit.observe.test_rules import FAULT, FINDING, SLOW

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.events import read_events
from ingot.observe.alerts import kinds
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

from .planted import planted

STARTED = {"from_step": 0, "world_size": 2, "device": "cuda", "attempt": 0}


def line(kind: str, time: float, **fields) -> bytes:
    return json.dumps({"kind": kind, "time": time, **fields}).encode() + b"\n"


def hostile_log(count: int) -> Iterator[tuple[bytes, int | None]]:
    """Yield pieces of the log of two runs in one folder, with the step that a whole line has: lines that are cut, mixed
    with others, of another version, with NaN, and with a clock that jumps."""
    random, time = Random(0), START
    yield line(events.RUN_STARTED, time, run="one", **STARTED), None
    for step in range(1, count + 1):
        time = START + step + random.choice((0.0, 0.0, 0.0, 0.0, -7200.0, 7200.0, 5e8, -5e8))
        whole = line(
            events.STEP, time, step=step, loss=random.choice((2.0, float("nan"), 1e308)), grad_norm=1.0, lr=1e-3
        )
        yield whole, step
        other = line(events.STRAGGLER, time, **SLOW | {"rank": step, "host": HOSTILE})
        cut = random.randrange(1, len(other) - 1)
        yield (
            random.choice(
                (
                    other,
                    line(events.FINDING, time, **FINDING),
                    other[:cut] + b"\n",  # of a writer that was killed
                    other[:cut] + line(events.FINDING, time, **FINDING) + other[cut:],  # two writers at once
                    line(events.PROGRESS, time, step=step, loss=2.0),  # without the fields of this version
                    line("of a later version", time, step=step, x=[HOSTILE]),
                    line(
                        events.PROGRESS, float("nan"), step=step, tokens=float("inf"), tokens_per_second=float("-inf")
                    ),
                    line(events.FAULT, time, **FAULT | {"step": 10**30}),
                    line(
                        events.METRICS, time, step=-step, by="x", values={"data/share/web": float("nan"), "y": 10**400}
                    ),
                    b"[" * 100_000 + b"\n" if step % 100 == 0 else b"[]\n",
                    b'{"kind": ["step"], "time": 1.0}\n{"kind": "step", "step": "1"}\n',
                    b"\x00\xff\xfe" * 50 + b"\n",
                )
            ),
            None,
        )
        if step == count // 2:
            yield line(events.FINISHED, time, step=step, tokens=1, seconds=1.0), None
            yield line(events.RUN_STARTED, time, run="two", **STARTED), None


def replayed(folder: RunFolder, capsys) -> dict:
    def no_number(text: str):
        raise ValueError(text)

    assert main(["alerts", str(folder.root), "--json", "--replay"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=no_number)


def alerted(root, lines) -> RunFolder:
    folder = RunFolder(root / "demo")
    folder.root.mkdir()
    folder.config.write_text(to_toml(run_of()))
    with folder.events.open("wb") as file:
        file.writelines(lines)
    return folder


def test_a_replay_of_a_hostile_log(tmp_path, capsys):
    folder = alerted(tmp_path, (piece for piece, _ in hostile_log(1500)))
    found = replayed(folder, capsys)
    assert found["unreadable_events"] > 100 and 3 < len(found["alerts"]) < 1500
    assert {kinds.STRAGGLER, kinds.SPIKE, kinds.RANK_LOST} <= {one["kind"] for one in found["alerts"]}
    text = json.dumps(found, ensure_ascii=False)
    assert "\\u001b" not in text and "\u202e" not in text


@pytest.mark.parametrize("count", [3000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_a_replay_of_a_million_alerts_shows_few(tmp_path, capsys, count):
    started = line(events.RUN_STARTED, START, run="one", **STARTED)
    slow = (line(events.STRAGGLER, START + n / 1000, **SLOW | {"rank": n}) for n in range(count))
    found = replayed(alerted(tmp_path, chain([started], slow)), capsys)
    assert [one["kind"] for one in found["alerts"]] == [kinds.STRAGGLER] * 4 + [kinds.RUN_ENDED]


@pytest.mark.parametrize("count", [600, pytest.param(200_000, marks=pytest.mark.nightly)])
def test_a_feed_of_a_hostile_log_loses_no_whole_line(tmp_path, count):
    folder, whole = planted(tmp_path, "[sinks.jsonl]\nclose_seconds = 3600\n"), []  # half of it to catch up
    with folder.events.open("wb") as file:
        for piece, step in hostile_log(count):
            file.write(piece)
            whole += [] if step is None else [step]
    command = [sys.executable, "-P", "-m", "ingot.observe.feed", str(folder.root)]
    done = subprocess.run(command, input=b"end\n", capture_output=True, timeout=3600)
    assert done.stdout.count(b"\n") == 1 and b"sink      jsonl raised" in done.stdout  # the first number that is none
    assert [event["reason"] for event in read_events(folder.events, events.SINK_FAILED)] == ["raised"]
    rows = map(json.loads, (folder.sinks / "jsonl" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "train/loss" in row] == whole

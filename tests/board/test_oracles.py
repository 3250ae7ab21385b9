"""The oracles see what they are for, and the table shows every row."""

import json
import struct

import pytest
from tests.checkpoints import write_checkpoint

from ingot.schema import events
from ingot.schema.run_folder import RunFolder

from . import ALL, MISSING
from . import __main__ as board
from .oracles import Verdicts, leftovers, o1, o2, o3, o7, read_facts, recover_seconds, redone, shared_memory
from .table import table_of


def bits(loss: float, norm: float = 1.0) -> tuple[bytes, bytes]:
    return struct.pack("<d", loss), struct.pack("<d", norm)


R = {1: [bits(4.0)], 2: [bits(3.0)]}


def test_o1_compares_bits_of_every_time_a_step_was_logged():
    assert o1({1: [bits(4.0)], 2: [bits(3.0), bits(3.0)]}, R) == ""
    assert "step 2" in o1({1: [bits(4.0)], 2: [bits(3.0), bits(3.0000000000000004)]}, R)
    assert "step 2" in o1({1: [bits(4.0)], 2: [bits(3.0, norm=1.0000000000000002)]}, R)
    assert "step 2 was not logged" in o1({1: [bits(4.0)]}, R)
    assert "step 3" in o1(R | {3: [bits(2.0)]}, R)
    assert "step 1" in o1({1: [bits(-0.0)]}, {1: [bits(0.0)]})


def test_o2_and_o3_name_the_difference():
    assert o2("ab", "ab") == "" and "cd" in o2("ab", "cd")
    samples = [(1, b"a"), (2, b"b")]
    assert o3(samples, samples) == ""
    assert "1 steps instead of 2" in o3(samples[:1], samples)
    assert "step 1 instead of step 2" in o3([(1, b"a"), (1, b"a")], samples)
    assert "step 2 has other samples" in o3([(1, b"a"), (2, b"c")], samples)


def test_o5_counts_from_the_fault_to_the_first_step_that_is_new(tmp_path):
    folder = RunFolder(tmp_path)
    log = [(events.RUN_STARTED, 1.0, 0), (events.STEP, 2.0, 5), (events.STEP, 3.5, 6)]
    log += [(events.RUN_STARTED, 5.0, 4), (events.STEP, 6.0, 5), (events.STEP, 7.0, 6), (events.STEP, 8.0, 7)]
    lines = [{"kind": kind, "time": time, "step": step, "loss": 1.0, "grad_norm": 1.0} for kind, time, step in log]
    folder.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert recover_seconds(folder, 3.0) == 5.0
    assert recover_seconds(folder, 5.5) is None
    assert redone({5: [bits(1.0)] * 2, 6: [bits(1.0)] * 2, 7: [bits(1.0)]}) == 2


def test_o7_sees_everything_that_can_be_left(tmp_path):
    folder, temporary = RunFolder(tmp_path / "run"), tmp_path / "temporary"
    temporary.mkdir()

    def left(alive=()) -> str:
        return o7(folder, temporary, shared_memory(), alive)

    folder.root.mkdir()
    assert left() == "there is no checkpoint"
    write_checkpoint(folder, 3, {"train.global_batch": 1, "train.seq_len": 1})
    assert left() == ""
    assert "processes [7]" in left(alive=[7])
    for path in (folder.checkpoints / ".saving-step-00000004", folder.ledger / ".a.1.tmp", folder.stop_request):
        path.mkdir()
        assert leftovers(folder) == [str(path.relative_to(folder.root))] and path.name in left()
        path.rmdir()
    (temporary / "file").write_bytes(b"")
    assert "temporary files" in left()
    (temporary / "file").unlink()
    (folder.checkpoint(3) / "manifest.json").write_bytes(b"{}")
    assert "damaged" in left()


def test_the_state_has_step_and_samples(tmp_path):
    states = []
    for step in (3, 4):
        folder = RunFolder(tmp_path / str(step))
        write_checkpoint(folder, step, {"train.global_batch": 2, "train.seq_len": 1})
        facts = read_facts(folder)
        assert [number for number, _ in facts.samples] == list(range(1, step + 1))
        states.append(facts.state)
    assert states[0] != states[1]


def test_every_row_of_the_design_is_in_the_table():
    listed = {name.split()[0] for name in [*MISSING, *(row.id for row in ALL)]}
    assert listed == {f"RS{number:02d}" for number in range(1, 37)}
    verdicts = Verdicts()
    verdicts.judge("o1", "here", "step 3 | differs")
    verdicts.judge("o3", "here", "")
    green = Verdicts()
    green.judge("o1", "here", "")
    table = table_of([green.as_json("RS09", 0), verdicts.as_json("RS10", 1)])
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[2:]}
    assert set(rows) == {*MISSING, *(row.id for row in ALL)}
    assert "**RED** in 1" in rows["RS10"] and "**NO**" in rows["RS10"] and "step 3 / differs" in rows["RS10"]
    assert "passes" in rows["RS09"] and "not run" in rows["RS11"] and "missing" in rows["RS19"]
    assert len({line.count("|") for line in table.splitlines()}) == 1


@pytest.mark.parametrize("finding", ["", "wrong"])
def test_a_row_that_asked_nothing_does_not_pass(finding):
    verdicts = Verdicts()
    assert verdicts.as_json("RS09", 0)["passed"] is False
    verdicts.judge("o2", "case", finding)
    line = verdicts.as_json("RS09", 0)
    assert (line["passed"], line["o2"], line["o1"]) == (not finding, not finding, None)


def test_recorded_lines_are_not_played_again(tmp_path, monkeypatch, capsys):
    """The board takes an hour: what an earlier run has recorded counts, and each line is recorded at once."""
    played = []

    def play(bench, row, seed):
        played.append((row.id, seed))
        return Verdicts().as_json(row.id, seed) | {"seconds": 1.0, "passed": True}

    monkeypatch.setattr(board, "play", play)
    monkeypatch.setattr(board.killpoints, "missing", lambda: "")
    recorded = tmp_path / "lines.jsonl"
    assert board.main(["--rows", "RS06", "--seeds", "1", "--json", str(recorded)]) == 0
    more = ["--rows", "RS06,RS03", "--seeds", "2", "--lines", str(recorded), "--json", str(recorded)]
    assert board.main(more) == 0
    assert played == [("RS06", 0), ("RS03", 0), ("RS03", 1), ("RS06", 1)]
    lines = [json.loads(text) for text in recorded.read_text().splitlines()]
    assert len(lines) == 4 and all(line["commit"] and line["date"] and line["machine"] for line in lines)
    assert "2 rows with 2 seeds in 0.1 minutes: 0 red" in capsys.readouterr().out
    assert board.main(["--rows", "RS06,RS03", "--seeds", "1", "--lines", str(recorded)]) == 0
    assert "2 rows with 1 seeds or more in 0.1 minutes: 0 red" in capsys.readouterr().out and len(played) == 4

"""The check of machines against each other: its judgment by hand, and whole checks with machines of this one."""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.errors import IngotError
from ingot.trainer.fleet import check
from ingot.trainer.fleet.check import check_fleet
from ingot.trainer.fleet.judge import Measured, first_pairs, judge, judge_links, second_pairs

GOOD = {"matmul": 100.0, "memory": 50.0, "disk": 10.0}
# A machine by given numbers: SPEEDS has node -> {"rates", "wrong", "link"}. The slower end limits a link.
PROBE = """
import json, os, sys
speeds = json.loads(sys.argv[1])
own = speeds[os.environ["SLURMD_NODENAME"]]
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "machine":
        answer = {"rates": own["rates"], "wrong": own["wrong"]}
    elif request["do"] == "open":
        answer = {"port": 1}
    else:
        here, path = os.environ["SLURMD_NODENAME"], sys.argv[2]
        open(f"{path}/{request['rank']}", "w").write(str(own["link"]))
        other = f"{path}/{1 - request['rank']}"
        while not os.path.exists(other) or not (theirs := open(other).read()):
            pass
        answer = {"link": min(own["link"], float(theirs))}
        open(f"{path}/{request['rank']}.done", "w").close()
        while not os.path.exists(f"{other}.done"):
            pass
        if request["rank"] == 0:
            import time
            time.sleep(0.1)
            for name in ("0", "1", "0.done", "1.done"):
                os.unlink(f"{path}/{name}")
    print(json.dumps(answer), flush=True)
"""


def _machine(node: str, clock: float = 0.0, wrong=(), **rates) -> Measured:
    return Measured(node=node, rates=GOOD | rates, wrong=dict(wrong), clock=clock)


def _found(unfit) -> list[tuple[str, str]]:
    return [(one.node, one.check) for one in unfit]


def test_a_machine_is_judged_by_the_median_of_the_others():
    fleet = [_machine(node) for node in "abcd"]
    assert judge(fleet) == []
    assert judge([*fleet[:3], _machine("d", matmul=80.0, memory=40.0, disk=6.0, clock=0.9)]) == []
    found = judge([*fleet[:3], _machine("d", matmul=70.0, memory=37.0, disk=4.0, clock=-5.0)])
    assert _found(found) == [("d", "matmul"), ("d", "memory"), ("d", "disk"), ("d", "clock")]
    assert found[0].words == "70.0% of the median of the others, less than 75%"
    assert _found(judge([_machine("a", wrong={"matmul": 1})])) == [("a", "matmul")]  # a machine alone, too
    assert _found(judge([_machine("a"), _machine("b", matmul=70.0)])) == [("b", "matmul")]


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_bad_link_is_isolated_by_two_rounds_of_pairs(count, bad):
    nodes = [f"node-{number}" for number in range(count)]
    rate = {node: 100.0 + number for number, node in enumerate(nodes)} | {nodes[bad]: 20.0}

    def measure(pairs):
        return {(a, b): min(rate[a], rate[b]) for a, b in pairs}

    first = measure(first_pairs(nodes))
    second = measure(second_pairs(nodes, first))
    assert {node for pair in first for node in pair} == set(nodes)
    assert count % 2 or not set(map(frozenset, first)) & set(map(frozenset, second))
    assert [one.node for one in judge_links([first, second])] == [nodes[bad]]


def test_the_slow_end_of_a_single_link_is_not_guessed():
    assert judge_links([{("a", "b"): 1.0}]) == [] and second_pairs(["a", "b"], {("a", "b"): 1.0}) == []


def _check(root: Path, node: str, nodes: int, command: list[str], send) -> None:
    os.environ["SLURMD_NODENAME"] = node
    try:
        result = check_fleet(root, nodes, command, lambda line: None, wait_seconds=20.0)
        send.send(sorted((one.node, one.check) for one in result.unfit))
        result.require_sound()
    except IngotError as error:
        send.send(error.code)
    os._exit(0)


def _fleet(root: Path, names: str, commands: dict[str, list[str]], nodes: int) -> dict[str, list]:
    """Check machines in processes of their own. Returns what each found, and the code of its error if it had one."""
    context, running = multiprocessing.get_context("fork"), {}
    for node in names:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_check, args=(root, node, nodes, commands[node], send))
        process.start()
        send.close()
        running[node] = process, receive
    found = {}
    for node, (process, receive) in running.items():
        process.join(60)
        assert not process.is_alive()
        found[node] = []
        while receive.poll():
            try:
                found[node].append(receive.recv())
            except EOFError:
                break
    return found


@pytest.fixture
def commands(tmp_path):
    """`commands({"d": {...}})`: the probes of four machines, of which some differ from a sound one."""
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "pair").mkdir()

    def make(changes: dict) -> dict[str, list[str]]:
        speeds = {node: {"rates": GOOD, "wrong": {}, "link": 100.0} | changes.get(node, {}) for node in "abcd"}
        command = [sys.executable, str(tmp_path / "probe.py"), json.dumps(speeds), str(tmp_path / "pair")]
        return dict.fromkeys("abcd", command)

    return make


def test_all_machines_name_the_bad_ones(commands, tmp_path):
    changes = {"b": {"wrong": {"memory": 3}}, "d": {"link": 20.0, "rates": GOOD | {"matmul": 40.0}}}
    unfit = [("b", "memory"), ("d", "link"), ("d", "matmul")]
    assert _fleet(tmp_path, "abcd", commands(changes), 4) == {node: [unfit, "E-NODES-UNFIT"] for node in "abcd"}
    assert not (tmp_path / "doctor-leader.json").exists()


def test_a_machine_that_cannot_be_measured_ends_the_check_of_all(commands, tmp_path):
    probes = commands({}) | {"b": [sys.executable, "-c", "raise SystemExit(1)"]}
    found = _fleet(tmp_path, "ab", probes, 2)
    assert set(found["b"] + found["a"]) <= {"E-PROBE-SILENT", "E-NODES-MISSING"} and all(found.values())


def test_a_measurement_may_take_longer_than_the_patience_with_a_silent_machine(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "_PATIENCE", 0.6)
    answers = {"machine": {"rates": GOOD, "wrong": {}}, "open": {"port": 1}, "link": {"link": 5.0}}
    slow = (
        "import json, sys, time\n"
        "for line in sys.stdin:\n"
        f"    time.sleep(1.2); print(json.dumps({answers!r}[json.loads(line)['do']]), flush=True)"
    )
    probes = {node: [sys.executable, "-c", slow] for node in "ab"}
    assert _fleet(tmp_path, "ab", probes, 2) == {"a": [[]], "b": [[]]}


def test_a_machine_that_does_not_come_is_missed(commands, tmp_path):
    with refused("E-NODES-MISSING"):
        check_fleet(tmp_path, 2, commands({})["a"], lambda line: None, wait_seconds=0.3)


def test_a_sound_machine_passes_and_its_disk_is_left_clean(tmp_path):
    """The real measurements: every repeated product has the same bits, memory keeps its patterns."""
    torch = pytest.importorskip("torch")
    from ingot.trainer.fleet.measure import measure_disk, measure_matmul, measure_memory

    began = time.monotonic()
    for measure in (measure_matmul, measure_memory):
        rate, wrong = measure(torch.device("cpu"), 0.05)
        assert rate > 1e6 and wrong == 0
    rate, wrong = measure_disk(tmp_path)
    assert rate > 1e3 and wrong == 0 and not list(tmp_path.iterdir())
    assert time.monotonic() > began


def test_a_product_that_changes_and_memory_that_forgets_are_counted(monkeypatch):
    torch = pytest.importorskip("torch")
    from ingot.trainer.fleet import measure

    honest, calls = torch.Tensor.copy_, []

    def forget(self, source):
        calls.append(1)
        honest(self, source)
        if len(calls) == 2:
            self[5] ^= 1
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", forget)
    assert measure.measure_memory(torch.device("cpu"), 0.0)[1] == 1
    monkeypatch.undo()
    products, multiply = [], torch.Tensor.__matmul__

    def slip(self, other):
        product = multiply(self, other)
        products.append(1)
        if len(products) == 2:
            product[0, 0] += 1e-3
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", slip)
    assert measure.measure_matmul(torch.device("cpu"), 0.0)[1] == 1

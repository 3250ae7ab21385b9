"""The check of machines against each other: its judgment by hand, and whole checks with machines of this one."""

import errno
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.expect import refused
from tests.fake_machines import GOOD, fake_machines
from tests.own_time import own_time

from ingot.errors import IngotError
from ingot.trainer.fleet import rounds
from ingot.trainer.fleet.judge import Measured, first_pairs, judge, judge_links, rate_text, second_pairs
from ingot.trainer.fleet.probe import FAILED, Probe
from ingot.trainer.launch import doctor
from ingot.trainer.launch.doctor import check_fleet


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
    facts = (rate_text("matmul", 70.0), "70.0%", rate_text("matmul", 100.0), "75%")
    assert all(fact in found[0].words for fact in facts)
    assert _found(judge([_machine("a", wrong={"matmul": 1})])) == [("a", "matmul")]  # a machine alone, too
    assert _found(judge([_machine("a"), _machine("b", matmul=70.0)])) == [("b", "matmul")]


def test_one_wrong_clock_of_three_is_one():
    """The median of a sound machine's two others is half of the wrong one's lead."""
    fleet = [_machine("a"), _machine("b", clock=0.3), _machine("c", clock=60.0)]
    assert _found(judge(fleet)) == [("c", "clock")]


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


def test_two_machines_without_a_link_are_both_unfit():
    assert _found(judge_links([{("a", "b"): 0.0}])) == [("a", "link"), ("b", "link")]
    rounds = [{("a", "b"): 9.0, ("c", "d"): 0.0}, {("c", "a"): 9.0, ("d", "b"): 0.0}]
    assert _found(judge_links(rounds)) == [("d", "link")]


def _check(root: Path, node: str, nodes: int, command: list[str], send) -> None:
    os.environ["SLURMD_NODENAME"] = node
    try:
        result = check_fleet(root, nodes, command, 0.1, lambda line: None, wait_seconds=20.0)
        send.send(sorted((one.node, one.check) for one in result.unfit))
        result.require_sound()
    except IngotError as error:
        send.send(error.code)
    os._exit(0)


def _fleet(
    root: Path, names: str, commands: dict[str, list[str]], nodes: int, first: str | None = None
) -> dict[str, list]:
    """Check machines in processes of their own. Returns what each found, and the code of its error if it had one.
    first: the one that leads."""
    context, running = multiprocessing.get_context("fork"), {}
    for node in names:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_check, args=(root, node, nodes, commands[node], send))
        process.start()
        send.close()
        running[node] = process, receive
        while node == first and not (root / "doctor-leader.json").exists():
            time.sleep(0.01)
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

    def make(changes: dict) -> dict[str, list[str]]:
        return dict.fromkeys("abcd", fake_machines(tmp_path / "machines", changes))

    return make


def test_all_machines_name_the_bad_ones(commands, tmp_path):
    changes = {"b": {"wrong": {"memory": 3}}, "d": {"link": 20.0, "rates": GOOD | {"matmul": 40.0}}}
    unfit = [("b", "memory"), ("d", "link"), ("d", "matmul")]
    assert _fleet(tmp_path, "abcd", commands(changes), 4) == {node: [unfit, "E-NODES-UNFIT"] for node in "abcd"}
    assert not (tmp_path / "doctor-leader.json").exists()


@pytest.mark.parametrize("leads", [True, False])
def test_a_machine_whose_measurement_ends_is_unfit_and_the_others_are_measured(commands, tmp_path, leads):
    """The machine that leads, or another one; the clocks of the others are compared all the same."""
    broken = "a" if leads else "b"
    probes = commands({"c": {"ahead": 60.0}, broken: {"ends": ["machine"]}})
    found = _fleet(tmp_path, "abcd", probes, 4, first="a")
    unfit = [(broken, "measurement"), ("c", "clock")]
    assert found == {node: [unfit, "E-NODES-UNFIT"] for node in "abcd"}


def test_a_machine_whose_links_end_its_measurement_is_found_by_its_pairs(commands, tmp_path):
    """The partner of the first round is found sound in the second one, by a new process."""
    hangs = {"ends": ["link"]}
    found = _fleet(tmp_path, "abcd", commands({"d": hangs, "c": {"link": 90.0}}), 4)
    assert found == {node: [[("d", "link")], "E-NODES-UNFIT"] for node in "abcd"}


@pytest.mark.slow
def test_a_machine_that_hung_with_a_bad_partner_is_measured_again(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "ANSWER_SECONDS", -2.0)
    assert _fleet(tmp_path, "abcd", commands({"c": {"stalls": ["link"]}}), 4) == {node: [[]] for node in "abcd"}


def test_a_measurement_without_an_end_is_given_up(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "ANSWER_SECONDS", -2.0)
    probes = commands({}) | {"b": [sys.executable, "-c", "import time; time.sleep(60)"]}
    assert _fleet(tmp_path, "ab", probes, 2) == {node: [[("b", "measurement")], "E-NODES-UNFIT"] for node in "ab"}


@pytest.mark.slow
def test_a_measurement_may_take_longer_than_the_patience_with_a_silent_machine(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_PATIENCE", 0.6)
    answers = {"machine": {"rates": GOOD, "wrong": {}}, "open": {"port": 1}, "link": {"link": 5.0}}
    slow = (
        "import json, sys, time\n"
        "for line in sys.stdin:\n"
        "    do = json.loads(line)['do']\n"
        "    time.sleep(0 if do == 'clock' else 1.2)\n"
        f"    print(json.dumps({answers!r}.get(do) or {{'clock': time.time()}}), flush=True)"
    )
    probes = {node: [sys.executable, "-c", slow] for node in "ab"}
    assert _fleet(tmp_path, "ab", probes, 2) == {"a": [[]], "b": [[]]}


def test_a_signal_ends_the_check_with_its_files_and_processes(tmp_path):
    """Also while a machine measures: that process gets no signal but the one which ends it."""
    waits = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    command = [sys.executable, "-c", waits, str(tmp_path / "measures")]
    program = (
        "import sys\nfrom ingot.cli import main\nfrom ingot.trainer.fleet import probe\n"
        f"probe.probe_command = lambda *_: {command!r}\n"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "doctor", str(tmp_path), "--nodes", "1"], stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "measures").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert "ended by SIGTERM" in process.communicate(timeout=30)[1] and process.returncode == 130
    assert {path.name for path in tmp_path.iterdir()} == {"measures", "doctor-lock"}
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _bytes(path)]


def test_a_measurement_outlives_the_signals_of_a_scheduler():
    """A scheduler signals every process of a job, also that one."""
    program = (
        "import os, signal, sys; sys.stdin.readline(); os.kill(os.getpid(), signal.SIGTERM); print({}, flush=True)"
    )
    with Probe([sys.executable, "-c", program]) as probe:
        probe.ask({"do": "machine"})
        while (found := probe.answer()) is None:
            probe.wait(1.0)
    assert found == {}


def test_a_measurement_for_which_no_process_is_left_has_an_answer(monkeypatch):
    """The next request goes to a new process."""
    honest, none_left = subprocess.Popen, OSError(errno.EAGAIN, "Resource temporarily unavailable")
    answers = [sys.executable, "-c", "input(); print('{}', flush=True)"]
    with Probe(answers) as probe:
        monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=none_left))
        probe.ask({"do": "machine"})
        assert none_left.strerror in probe.answer()[FAILED] and probe.answer() is None
        monkeypatch.setattr(subprocess, "Popen", honest)
        probe.ask({"do": "machine"})
        while (found := probe.answer()) is None:
            probe.wait(1.0)
    assert found == {}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a process that has ended
        return b""


def test_a_machine_that_does_not_come_is_missed(commands, tmp_path):
    with refused("E-NODES-MISSING"):
        check_fleet(tmp_path, 2, commands({})["a"], 0.1, lambda line: None, wait_seconds=0.3)


def test_a_sound_machine_passes_and_its_disk_is_left_clean(tmp_path, monkeypatch):
    """The real measurements: every repeated product has the same bits, memory keeps its patterns."""
    torch = pytest.importorskip("torch")
    from ingot.trainer.fleet import measure as measures
    from ingot.trainer.fleet.measure import measure_disk, measure_matmul, measure_memory

    monkeypatch.setattr(measures, "_CPU_BYTES", 1 << 20)
    began = time.monotonic()
    for measure in (measure_matmul, measure_memory):
        rate, wrong = measure(torch.device("cpu"), 0.05)
        assert rate > 1e6 and wrong == 0
    rate, wrong = measure_disk(tmp_path)
    assert rate > 1e3 and wrong == 0 and not list(tmp_path.iterdir())
    assert time.monotonic() > began


def test_the_check_of_memory_takes_the_time_that_it_is_given(monkeypatch):
    """Filling and comparing included, which takes longer than copying: two seconds of copies took half a minute."""
    torch = pytest.importorskip("torch")
    from ingot.trainer.fleet import measure

    clock = itertools.count()
    monkeypatch.setattr(measure, "_CPU_BYTES", 64)
    own_time(monkeypatch, measure, monotonic=lambda: next(clock), perf_counter=lambda: 0.001 * next(clock))
    measure.measure_memory(torch.device("cpu"), 60.0)
    assert 60 <= next(clock) < 250


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

    monkeypatch.setattr(measure, "_CPU_BYTES", 64)
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

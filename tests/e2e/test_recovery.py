"""Real `ingot train` processes, disturbed in every way that users report, compared with an undisturbed run."""

import contextlib
import json
import os
import re
import signal
import threading
import time

import pytest

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.tokens import read_token_manifest
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.keeper import keeper_name, reach_local
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.running import PlannedRestart
from ingot.trainer.launch.train import train
from ingot.trainer.loader.ledger import prove, read_ledger
from ingot.trainer.loader.order import Order
from ingot.trainer.optim.schedule import learning_rate

from .conftest import Project, ended, paused, workers_of, writer_of

STEPS = 120


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> dict[int, tuple[float, float]]:
    output = project.train("undisturbed", PYTHONPROFILEIMPORTTIME="1")  # its log lists every import
    assert "step 120/120" in output and "Next:" in output
    facts = project.facts("undisturbed")
    assert list(facts) == list(range(1, STEPS + 1))
    config = load_run(project.run_file)
    for step, (*_, lr) in facts.items():
        assert lr == learning_rate(STEPS, config.optim.lr, config.schedule)(step)
    prove_ledger(project, "undisturbed")
    return facts


def prove_ledger(project: Project, out: str) -> None:
    """Check what the newest checkpoint says was consumed is what the order says, sample by sample, from step 1 on."""
    folder = project.folder(out)
    newest = list_checkpoints(folder.checkpoints)[0].manifest
    assert newest is not None and newest.step == STEPS
    config = load_run(folder.config)
    tokens = read_token_manifest(folder.root / config.data.tokens)
    order = Order(tokens, config.train.seq_len, config.seed, config.data.weights)
    consumed = list(read_ledger(folder.ledger, newest.ledger))
    assert [step for step, _ in consumed] == list(range(1, STEPS + 1))
    prove(consumed, order, config.train.global_batch)


def wait_for(condition, process, seconds: float = 60) -> None:
    """Wait until `condition()` holds; the run must not end before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_gone(project: Project, out: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while workers_of(project.folder(out)):
        assert time.monotonic() < deadline, f"processes outlived the run by {seconds} s"
        time.sleep(0.05)


def test_a_rank_imports_neither_the_compiler_nor_fsdp(project, undisturbed):
    log = project.folder("undisturbed").root / "logs" / "attempt-1.log"
    imported = set(re.findall(r"import time:.*\| *([\w.]+)$", log.read_text(), re.MULTILINE))
    assert "ingot.trainer.loop" in imported
    assert not imported & {"sympy", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"}


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_rank_costs_nothing_but_time(project, undisturbed, rank):
    out = f"killed-{rank}"
    process = project.start(out)
    project.wait_for_step(out, 50, process)
    os.kill(project.rank_pid(out, rank), signal.SIGKILL)
    output = ended(process, 0)
    log = project.folder(out).events
    (fault,) = read_events(log, events.FAULT)
    assert (fault["rank"], fault["cause"]) == (rank, "was killed (SIGKILL)")
    assert [e["attempt"] for e in read_events(log, events.RESTART)] == [1]
    resumed = [e["from_step"] for e in read_events(log, events.RUN_STARTED)]
    assert resumed[0] == 0 and resumed[1] >= 40 and resumed[1] % 20 == 0
    restarts = [line for line in output.splitlines() if "SIGKILL" in line]
    assert len(restarts) == 1 and f"restarting from step {resumed[1]} (1 of 3)" in restarts[0]
    assert "Traceback" not in output
    assert project.facts(out) == undisturbed  # every loss and every gradient norm, bit for bit
    prove_ledger(project, out)
    assert not workers_of(project.folder(out))


@pytest.mark.slow
def test_a_rank_keeps_its_process_when_another_is_lost(project, undisturbed):
    """Rank 1 is lost, and later rank 0, which has the store in which they find each other."""
    process = project.start("partial", "--set", 'launch.restart="partial"')
    pids = []
    for rank, step in ((1, 30), (0, 70)):
        project.wait_for_step("partial", step, process)
        pids.append([project.rank_pid("partial", either) for either in (0, 1)])
        os.kill(pids[-1][rank], signal.SIGKILL)
    output = ended(process, 0)
    pids.append([project.rank_pid("partial", either) for either in (0, 1)])
    assert pids[0][0] == pids[1][0] != pids[2][0] and pids[0][1] != pids[1][1] == pids[2][1]
    assert [e["kept"] for e in read_events(project.folder("partial").events, events.RESTART)] == [1, 1]
    assert output.count("; 1 rank keeps its process") == 2 and "Traceback" not in output
    assert project.facts("partial") == undisturbed
    prove_ledger(project, "partial")
    assert not workers_of(project.folder("partial"))


@pytest.mark.slow
def test_ranks_keep_their_processes_when_a_restart_is_planned(project, undisturbed, monkeypatch):
    """The restart is wanted at step 50; the ranks save, and continue from their snapshot in memory."""
    folder = project.folder("planned")

    def found(kind: str, field: str) -> list:
        return [event[field] for event in read_events(folder.events, kind)]

    def wanted(job: JobHere, slow: object) -> PlannedRestart | None:
        is_first = not found(events.PLANNED_RESTART, "step")
        return PlannedRestart("a node joined") if is_first and 50 in found(events.STEP, "step") else None

    monkeypatch.setattr(JobHere, "planned_restart", wanted)
    overrides = ("launch.restart=partial", "checkpoint.mode=async", "checkpoint.replicas=1")
    result = train(project.run_file, folder.root, overrides=overrides, quiet=True)
    assert result.finished and result.restarts == 0 and found(events.RUN_STARTED, "attempt") == [0, 1]
    pids = found(events.RANK_STARTED, "pid")
    assert len(pids) == 4 and len(set(pids)) == 2 and found(events.PLANNED_RESTART, "kept") == [2]
    assert found(events.SNAPSHOT_RESTORED, "step") == found(events.PLANNED_RESTART, "step")
    assert project.facts("planned") == undisturbed and len(found(events.STEP, "step")) == STEPS
    prove_ledger(project, "planned")


@pytest.mark.slow
def test_2_to_1_to_4_ranks(project, undisturbed):
    """Another number of ranks adds in another order: 1e-6 relative over 20 steps; the samples are exactly the same.

    The last layout has copies of a model that is divided, so that a rank's part of the batch depends on two axes.
    """
    out = "resharded"
    project.train(out, "--until-step", "40", code=10)
    one = project.train(out, "--until-step", "80", "--set", "parallel.dp_shard=1", code=10)
    assert "changed   parallel.dp_shard   2 -> 1   same mathematics" in one
    project.train(out, "--set", "parallel.dp_replicate=2")
    worlds = [e["world_size"] for e in read_events(project.folder(out).events, events.RUN_STARTED)]
    assert worlds == [2, 1, 4]
    facts = project.facts(out)
    assert list(facts) == list(range(1, STEPS + 1))
    assert all(facts[step] == undisturbed[step] for step in range(1, 41))
    for step in [*range(41, 61), *range(81, 101)]:
        for ours, theirs in zip(facts[step], undisturbed[step], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6), f"step {step}"
    prove_ledger(project, out)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_continues(project, undisturbed):
    out = "stopped"
    process = project.start(out)
    project.wait_for_step(out, 30, process)
    with paused(project.folder(out)):  # the run could end while the second one starts
        second = project.train(out, code=30)
    assert "E-RUN-BUSY" in second and f":{process.pid} " in second
    for pid in workers_of(project.folder(out)):
        os.kill(pid, signal.SIGTERM)  # a scheduler may signal all processes of a job; the supervisor decides
    process.send_signal(signal.SIGINT)
    output = ended(process, 10)
    assert "Next:" in output and f"ingot train {project.folder(out).root}" in output
    stopped = next(read_events(project.folder(out).events, events.STOPPED))["step"]
    assert 30 <= stopped < STEPS
    assert list_checkpoints(project.folder(out).checkpoints)[0].step == stopped
    assert not workers_of(project.folder(out))
    checkpoints, elsewhere = project.folder(out).checkpoints, project.root / "unmounted"
    checkpoints.rename(elsewhere)
    assert "E-CKPT-VANISHED" in project.train(out, code=21)
    elsewhere.rename(checkpoints)
    assert f"after step {stopped} of {STEPS}" in project.train(out)
    assert project.facts(out) == undisturbed
    prove_ledger(project, out)
    assert "is finished" in project.train(out)
    for checkpoint in list_checkpoints(project.folder(out).checkpoints):
        (checkpoint.path / "manifest.json").unlink()
    assert "E-CKPT-NONE-USABLE" in project.train(out, code=21)  # and not "finished"


@pytest.mark.slow
def test_no_process_outlives_the_supervisor(project, undisturbed):
    """SIGKILL leaves it no chance to clean up, a second Ctrl-C no time to save. Both times the same command goes on."""
    out = "orphaned"
    process = project.start(out)
    project.wait_for_step(out, 30, process)
    process.kill()
    process.communicate()
    wait_until_gone(project, out, seconds=3)
    process = project.start(out, "--set", "checkpoint.every_steps=100")
    project.wait_for_step(out, 60, process)
    os.kill(project.rank_pid(out, 1), signal.SIGSTOP)  # so that no rank begins to save before the second signal
    process.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = ended(process, 130)
    assert "the same command continues" in output
    assert not workers_of(project.folder(out))
    project.train(out)
    assert project.facts(out) == undisturbed
    prove_ledger(project, out)


@pytest.mark.slow
def test_a_scheduler_that_signals_every_process_twice_gets_a_saved_run(project, undisturbed):
    """Slurm's --signal=USR1@SECONDS, and its SIGTERM when the time is over, reach the ranks and their writers, too."""
    out = "preempted"
    process = project.start(out, "--set", "checkpoint.mode=async", "--set", "launch.grace=60s")
    project.wait_for_step(out, 30, process)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        for pid in [process.pid, *workers_of(project.folder(out))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    output = ended(process, 10)
    (stopped,) = read_events(project.folder(out).events, events.STOPPED)
    step = stopped["step"]
    assert stopped["saved_step"] == step >= 30 and stopped["reason"] == "SIGUSR1"
    assert f"stopped at step {step}; step {step} is saved and verified" in output
    assert not workers_of(project.folder(out)) and not list(read_events(project.folder(out).events, events.FAULT))
    assert f"after step {step} of {STEPS}" in project.train(out)
    assert project.facts(out) == undisturbed
    prove_ledger(project, out)


@pytest.mark.slow
def test_a_time_limit_ends_in_a_checkpoint(project):
    out = "limited"
    output = project.train(out, "--set", "train.steps=1000000", "--set", "launch.stop_after=00:00:06", code=10)
    (stopped,) = read_events(project.folder(out).events, events.STOPPED)
    step = list_checkpoints(project.folder(out).checkpoints)[0].step
    assert (stopped["step"], stopped["saved_step"], stopped["reason"]) == (step, step, "launch.stop_after")
    assert f"step {step} is saved and verified" in output and "Next:" in output


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_refused_aloud(project, undisturbed):
    out = "damaged"
    project.train(out, "--until-step", "40", code=10)
    file = project.folder(out).checkpoint(40) / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 128  # a tensor; random states are at the end
    file.write_bytes(content)
    output = project.train(out)
    (refused,) = read_events(project.folder(out).events, events.CHECKPOINT_REFUSED)
    assert refused["step"] == 40 and "rank-00001.safetensors" in refused["reason"] and "tensor " in refused["reason"]
    (line,) = [line for line in output.splitlines() if line.startswith("refused")]
    assert "step-00000040" in line
    assert output.count("continue  after step 20, from the newest sound checkpoint\n") == 1
    assert project.facts(out) == undisturbed
    prove_ledger(project, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(0, id="run folder"), pytest.param(2, id="two disks", marks=pytest.mark.nightly)]
)
def test_everything_is_killed_while_a_checkpoint_is_written(project, undisturbed, number):
    """The writer of rank 1 is stopped, so a save never ends; then the supervisor and all ranks get SIGKILL. The stopped
    writer ends with them, and the same command continues from the last checkpoint that was complete."""
    out, background = f"unfinished-{number}", ["--set", "checkpoint.mode=async"]
    disks = [project.root / f"nvme{one}" for one in range(number)]
    for disk in disks:
        disk.mkdir()
    if disks:
        background += ["--set", f"checkpoint.disks={json.dumps(list(map(str, disks)))}"]
    process = project.start(out, *background)
    folder = project.folder(out)
    wait_for(lambda: any(read_events(folder.events, events.CHECKPOINT)), process)
    os.kill(writer_of(project.rank_pid(out, 1)), signal.SIGSTOP)

    def written():  # by rank 0
        unfinished = [path.name.removeprefix(".saving-").partition(".")[0] for path in folder.checkpoints.glob(".s*")]
        own = disks[0].glob(f"*/{unfinished[0]}/rank-*") if disks and unfinished else ()
        return list(own) or list(folder.checkpoints.glob(".saving-*/rank-00000.safetensors"))

    wait_for(written, process)
    for pid in [process.pid, *(project.rank_pid(out, rank) for rank in range(2))]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    wait_until_gone(project, out, seconds=5)
    saved = list_checkpoints(folder.checkpoints)[0].step
    project.train(out, *background)
    assert [e["from_step"] for e in read_events(folder.events, events.RUN_STARTED)] == [0, saved]
    assert project.facts(out) == undisturbed
    prove_ledger(project, out)
    newest, whole = (list_checkpoints(project.folder(name).checkpoints)[0] for name in (out, "undisturbed"))
    assert newest.manifest.files == whole.manifest.files  # weights, moments and random states, bit for bit
    assert not list(folder.checkpoints.glob(".*"))
    assert not workers_of(folder)
    for rank, disk in enumerate(disks):
        (own,) = disk.iterdir()
        found = {step.name: [path.name[:10] for path in step.iterdir()] for step in own.iterdir()}
        assert found == {one.path.name: [f"rank-0000{rank}"] for one in list_checkpoints(folder.checkpoints)}


@pytest.mark.slow
def test_a_killed_rank_continues_from_memory_and_nothing_is_left(project, undisturbed):
    """Within a program that lives on: the process that keeps snapshots survives the ranks, and ends with the run."""
    folder = project.folder("in-memory")

    def disturb() -> None:
        deadline = time.monotonic() + 60
        while not any(e["step"] == 60 for e in read_events(folder.events, events.SNAPSHOT_KEPT)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for path in folder.checkpoints.glob("step-*/rank-*"):
            path.unlink()
        os.kill(project.rank_pid("in-memory", 1), signal.SIGKILL)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    overrides = ("checkpoint.mode=async", "checkpoint.replicas=1", "checkpoint.every_steps=60")  # far apart
    result = train(project.run_file, folder.root, overrides=overrides, quiet=True)
    disturbing.join()
    assert result.finished and result.restarts == 1
    (restored,) = read_events(folder.events, events.SNAPSHOT_RESTORED)
    assert restored["step"] == 60 and restored["peer_bytes"] == 0
    assert project.facts("in-memory") == undisturbed
    prove_ledger(project, "in-memory")
    with pytest.raises(OSError):
        reach_local(keeper_name(os.getpid(), folder.root))

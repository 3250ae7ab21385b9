"""The faults of a drill: what each does to a job that trains, from outside, and what has to be reported. No torch.

They have the ids of the board of reliability (docs/reliability.md). Quiet faults, which end no process, are in
quiet.py; those after which memory replaces the checkpoints in memory.py; those of the program of a rank in programs.py;
reports of the machine in machines.py. The rest of the board's rows, with the reasons, is in rows.py.
"""

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ingot.drill.damage import cut, flip_any
from ingot.drill.fault import DrillFault
from ingot.drill.guarded import with_settings
from ingot.drill.job import send
from ingot.drill.machines import MACHINE_FAULTS
from ingot.drill.memory import MEMORY_FAULTS
from ingot.drill.programs import PROGRAM_FAULTS, several
from ingot.drill.quiet import QUIET_FAULTS
from ingot.drill.trial import DrilledRun, Trial
from ingot.errors import EXIT_PREEMPTED, RunBusyError
from ingot.schema import events
from ingot.schema.checkpoint import file_of
from ingot.schema.run import RunConfig
from ingot.trainer.checkpoint.manifest import MANIFEST, candidate_folders
from ingot.trainer.checkpoint.writer import LOST_WRITER
from ingot.trainer.resilience.lock import BUSY

INTERRUPTED = 130
_STOP_SECONDS = 2.0  # from a request to stop to the end, besides the steps that are under way
_STOP_STEPS = 10


# -- ranks and processes of the job --


def _kill_rank(trial: Trial) -> None:
    trial.signal_ranks(signal.SIGKILL, [trial.any_rank()])


def _segv_rank(trial: Trial) -> None:
    trial.signal_ranks(signal.SIGSEGV, [trial.any_rank()])


def _ended_by(name: str) -> Callable[[Trial], str]:
    def expects(trial: Trial) -> str:
        faults = [(e["rank"], name in e["cause"]) for e in trial.found(events.FAULT)]
        return "" if faults == [(trial.named[0], True)] else f"faults {faults}, not one of rank {trial.named[0]}"

    return expects


def _partial(run: DrilledRun, place: Path) -> DrilledRun:
    return with_settings(run, {"launch.restart": "partial"})


def _alone_new(trial: Trial) -> str:
    """Return what is wrong with a restart in which the killed rank alone may get a new process."""
    if problem := _ended_by("SIGKILL")(trial):
        return problem
    processes: dict[int, set[int]] = {}
    for event in trial.found(events.RANK_STARTED):
        processes.setdefault(event["rank"], set()).add(event["pid"])
    new = [rank for rank in sorted(processes) if len(processes[rank]) > 1]
    return "" if new == [*trial.named] else f"ranks {new} got new processes, not rank {trial.named[0]} alone"


def _kill_server(trial: Trial) -> None:
    assert trial.launcher is not None
    server = trial.job.fork_server(trial.launcher.pid)
    trial.injects("SIGKILL of the process that starts ranks")
    if server is not None:
        send(signal.SIGKILL, [server])


def _one_fault(trial: Trial) -> str:
    faults = trial.found(events.FAULT)
    return "" if len(faults) == 1 else f"{len(faults)} faults were reported, not one: {[e['cause'] for e in faults]}"


def _kill_launcher(trial: Trial) -> None:
    assert trial.launcher is not None
    trial.injects("SIGKILL of the launcher")
    trial.launcher.kill()


def _kill_all(trial: Trial) -> None:
    trial.injects("SIGKILL of all processes")
    trial.job.kill(*trial.launchers)


def _continued(trial: Trial) -> str:
    starts = len(trial.found(events.RUN_STARTED))
    faults = [event["cause"] for event in trial.found(events.FAULT)]
    return "" if starts == 2 and not faults else f"{starts} attempts trained, not two; faults {faults}"


def _kill_writer(trial: Trial) -> None:
    writers = sorted(trial.job.writers())
    trial.injects("SIGKILL of a process that writes checkpoints")
    if writers:
        send(signal.SIGKILL, [trial.random.choice(writers)])


def _undisturbed(trial: Trial) -> str:
    faults = [event["cause"] for event in trial.found(events.FAULT)]
    if faults or trial.folder.incidents.exists():
        return f"a fault was reported: {faults or 'a hang'}"
    failed = [event["code"] for event in trial.found(events.CHECKPOINT_FAILED)]
    return "" if failed in ([], [LOST_WRITER]) else f"failed saves: {failed}"


# -- hangs --


def _stop_rank(trial: Trial) -> None:
    trial.signal_ranks(signal.SIGSTOP, [trial.any_rank()])


def _stop_all(trial: Trial) -> None:
    trial.signal_ranks(signal.SIGSTOP, range(trial.run.ranks))


def _hang_found(trial: Trial) -> str:
    faults = trial.found(events.FAULT)
    right = [(e["detected_by"], e["rank"] in trial.named, "SIGSTOP" in e["cause"]) for e in faults]
    if right != [("watchdog", True, True)]:
        return f"faults {[(e['detected_by'], e['rank'], e['cause']) for e in faults]}, not one hang by SIGSTOP"
    if late := trial.found_late(faults[0]):
        return late
    stacks = [p for p in trial.folder.incidents.rglob("rank-*.stacks") if "trainer/loop.py" in p.read_text()]
    wanted = trial.run.ranks - len(trial.named)
    return "" if len(stacks) == wanted else f"stacks of {len(stacks)} ranks were kept, not of {wanted}"


def _pause(trial: Trial, ranks: Sequence[int]) -> None:
    """Stop ranks for half the time of the watchdog."""
    alive = trial.job.ranks()
    trial.signal_ranks(signal.SIGSTOP, ranks)
    time.sleep(trial.run.config.launch.watchdog_seconds / 2)
    send(signal.SIGCONT, [alive[rank] for rank in ranks if rank in alive])


def _pause_rank(trial: Trial) -> None:
    _pause(trial, [trial.any_rank()])


def _pause_all(trial: Trial) -> None:
    _pause(trial, range(trial.run.ranks))


# -- requests to stop, and a second command --


def _requests(*numbers: signal.Signals) -> Callable[[Trial], None]:
    def inject(trial: Trial) -> None:
        assert trial.launcher is not None
        trial.injects(_names(numbers))
        began = time.monotonic()
        for position, number in enumerate(numbers):
            time.sleep(trial.random.uniform(0, 0.1) if position else 0)
            trial.launcher.send_signal(number)
        trial.follow()  # kills a job that hangs, and judges it
        trial.stopped_seconds = time.monotonic() - began
        trial.stop_reasons = tuple(number.name for number in numbers)

    return inject


def _names(numbers: Iterable[signal.Signals]) -> str:
    return " and ".join(number.name for number in numbers)


def _stopped(trial: Trial) -> str:
    seconds, code = trial.stopped_seconds, trial.codes[0]
    trial.verdicts.numbers["stop_s"] = max(seconds, trial.verdicts.numbers.get("stop_s", 0.0))
    if code == INTERRUPTED:  # the second signal came before the checkpoint was there
        return ""
    usual = _STOP_SECONDS + _STOP_STEPS * trial.run.step_seconds
    if seconds > usual:  # no fault of the run: the machine may be busier than when the reference was trained
        trial.output.say(f"  slow       it took {seconds:.1f} s to stop, more than the {usual:.1f} s that are usual")
    stopped = trial.found(events.STOPPED)
    reasons = [event["reason"] for event in stopped[:1]]
    if trial.stop_reasons and reasons and reasons[0] not in trial.stop_reasons:
        return f"it stopped for {reasons[0]}, not for {' or '.join(trial.stop_reasons)}"
    stops = [(event["step"], event["saved_step"]) for event in stopped]
    return "" if stops and stops[0][0] == stops[0][1] else f"stopped at (step, saved step) {stops}: a step is not saved"


def _launch_again(trial: Trial) -> None:
    trial.injects("the same command again, while it trains")
    second = trial.job.start()
    output, _ = second.communicate()
    assert trial.launcher is not None
    if trial.launcher.poll() is not None:
        return  # the first one has ended before the second one looked
    refused = second.returncode == RunBusyError.exit_code and BUSY in output
    trial.judge("o6", "" if refused else f"the second command ended with {second.returncode}: {output[-300:]}")


# -- damage to checkpoints --


def _damaged(change: Callable[..., str], what: str) -> Callable[[Trial], None]:
    def inject(trial: Trial) -> None:
        trial.injects(f"SIGKILL of all processes, and {what} of the newest checkpoint")
        trial.job.kill(*trial.launchers)
        newest = candidate_folders(trial.folder.checkpoints)[0]
        files = [newest / MANIFEST, *(newest / file_of(rank) for rank in range(trial.run.ranks))]
        file = trial.random.choice([path for path in files if path.exists()])
        trial.output.say(f"  damaged    {change(file, trial.random)} of {newest.name}")
        _note(trial.folder.root).write_text(f"{newest.name} {file.name}")

    return inject


def _note(root: Path) -> Path:
    """Return the file, beside a run folder, with the name of the checkpoint that was damaged and of its file."""
    return root.with_name(f"{root.name}.damaged")


def _fell_back(trial: Trial) -> str:
    newest, file = _note(trial.folder.root).read_text().split()
    refused = [event for event in trial.found(events.CHECKPOINT_REFUSED) if Path(event["path"]).name == newest]
    if not refused:
        return f"the damaged {newest} was not refused"
    if file not in f"{refused[0]['path']} {refused[0]['reason']}":
        return f"no reason names {file}: {refused[0]['reason']}"
    begun = trial.found(events.RUN_STARTED)[-1]["from_step"]
    return "" if 0 < begun < refused[0]["step"] else f"continued from step {begun}, not from an older checkpoint"


# -- the list --


def _writes_aside(config: RunConfig) -> str:
    return "" if config.checkpoint.mode == "async" else "with checkpoint.mode = 'sync' the ranks write checkpoints"


_KILLED = frozenset({-signal.SIGKILL})
_SAVED = frozenset({EXIT_PREEMPTED})

FAULTS: tuple[DrillFault, ...] = (
    DrillFault(id="RS01", injects="SIGKILL of a rank", inject=_kill_rank, expects=_ended_by("SIGKILL"), smoke=True),
    DrillFault(
        id="RS01 server", injects="SIGKILL of the process that starts ranks", inject=_kill_server, expects=_one_fault
    ),
    DrillFault(
        id="RS01 partial",
        injects="SIGKILL of a rank; the others keep their processes",
        inject=_kill_rank,
        expects=_alone_new,
        needs=several,
        soaks=False,
        prepare=_partial,
    ),
    DrillFault(id="RS02", injects="a segmentation fault of a rank", inject=_segv_rank, expects=_ended_by("SIGSEGV")),
    DrillFault(
        id="RS03",
        injects="a rank that does not go on (SIGSTOP)",
        inject=_stop_rank,
        expects=_hang_found,
        smoke=True,
    ),
    DrillFault(
        id="RS03 all",
        injects="all ranks do not go on (SIGSTOP)",
        inject=_stop_all,
        expects=_hang_found,
        needs=several,
    ),
    DrillFault(
        id="RS06",
        injects="a pause of a rank, shorter than the watchdog",
        inject=_pause_rank,
        expects=_undisturbed,
        intervals=0,
    ),
    DrillFault(
        id="RS06 all",
        injects="a pause of all ranks, shorter than the watchdog",
        inject=_pause_all,
        expects=_undisturbed,
        intervals=0,
        needs=several,
    ),
    *MEMORY_FAULTS,
    DrillFault(
        id="RS08",
        injects="SIGKILL of all processes; the same command again",
        inject=_kill_all,
        expects=_continued,
        codes=_KILLED,
        smoke=True,
    ),
    DrillFault(
        id="RS08 launcher",
        injects="SIGKILL of the launcher; the same command again",
        inject=_kill_launcher,
        expects=_continued,
        codes=_KILLED,
    ),
    DrillFault(
        id="RS10",
        injects="a wrong bit in the newest checkpoint",
        inject=_damaged(flip_any, "a wrong bit"),
        expects=_fell_back,
        codes=_KILLED,
        intervals=2,
        saves=2,
        smoke=True,
    ),
    DrillFault(
        id="RS11",
        injects="a file of the newest checkpoint is cut",
        inject=_damaged(cut, "a cut file"),
        expects=_fell_back,
        codes=_KILLED,
        intervals=2,
        saves=2,
    ),
    DrillFault(
        id="RS15",
        injects="SIGKILL of a process that writes checkpoints",
        inject=_kill_writer,
        expects=_undisturbed,
        intervals=0,
        saves=1,
        needs=_writes_aside,
    ),
    *(
        DrillFault(
            id=name,
            injects=f"{_names(numbers)}: it saves and stops; the same command again",
            inject=_requests(*numbers),
            expects=_stopped,
            codes=codes,
            intervals=intervals,
            smoke=name == "RS28",
        )
        for name, numbers, codes, intervals in (
            ("RS28", (signal.SIGTERM,), _SAVED, 0),
            ("RS28 interrupt", (signal.SIGINT,), _SAVED, 0),
            ("RS28 user", (signal.SIGUSR1,), _SAVED, 0),
            ("RS28 twice", (signal.SIGTERM, signal.SIGTERM), _SAVED | {INTERRUPTED}, 1),
        )
    ),
    DrillFault(
        id="RS30",
        injects="the same command while it trains",
        inject=_launch_again,
        expects=_undisturbed,
        intervals=0,
    ),
    *QUIET_FAULTS,
    *PROGRAM_FAULTS,
    *MACHINE_FAULTS,
)


def faults_of(row: str) -> list[DrillFault]:
    """Return the faults of a row of the board, or the one with this whole id."""
    return [fault for fault in FAULTS if fault.id == row or fault.id.split()[0] == row]

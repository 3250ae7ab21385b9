"""A job whose ranks are all on this machine, or the part of a job that is on this machine."""

import os
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ingot.machine.health.rules import HealthFinding
from ingot.schema.launch import Launch
from ingot.schema.run_folder import Job, RunFolder
from ingot.trainer.checkpoint.keeper import end_keeper
from ingot.trainer.launch.checking import MachineCheck
from ingot.trainer.launch.evidence import examine, incident_of, question, waits_for
from ingot.trainer.launch.health import HealthWatch, Sickness, record_alone, restart_for, unhealthy, write_drained
from ingot.trainer.launch.layouts import Layouts
from ingot.trainer.launch.local import LocalJob
from ingot.trainer.launch.running import PlannedRestart, RunningJob, next_log, ranks_of
from ingot.trainer.launch.slow_nodes import NONE_SLOW, SlowRank
from ingot.trainer.launch.watchdog import Hang, Watchdog
from ingot.trainer.mesh.start import NodeShare
from ingot.trainer.resilience.endings import RankEnding, clear_endings, read_endings
from ingot.trainer.resilience.heartbeat import Beat
from ingot.trainer.resilience.incidents import AttemptEnd, JobIncident, explain
from ingot.trainer.resilience.start_times import FIRST, Ordered

_LOG_CHARACTERS = 1 << 14  # that another machine gets


class JobHere(RunningJob):
    """The ranks of this machine. job: with `processes` of them. layouts: of a job that is on this machine alone.
    health: of this machine; None: nobody looks. say: shows the check of the machine."""

    def __init__(
        self,
        folder: RunFolder,
        job: Job,
        launch: Launch,
        *,
        layouts: Layouts | None = None,
        show_output: bool = True,
        health: HealthWatch | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._layouts = layouts or Layouts(folder, launch)
        self._folder, self.job, self._launch, self._say = folder, job, launch, say
        self.health, self.sickness = health, Sickness()
        self._check: MachineCheck | None = None
        self._checked: tuple[int, Ordered] = -1, FIRST  # the attempt that waits for it
        output = None if show_output else subprocess.DEVNULL
        self._local = LocalJob(job, stdout=output, partial=launch.restart == "partial")
        self._watchdog = Watchdog(launch, self._local.heartbeats)
        self.first = 0  # the lowest rank here
        self._suspected: Hang | None = None

    def prepare(self, name: str) -> None:
        """Import what the ranks will need. name: of the log."""
        self._local.prepare(self._folder.logs / name)

    def start(
        self,
        attempt: int,
        before: Ordered = FIRST,
        name: str = "",
        share: NodeShare | None = None,
        overrides: Sequence[str] = (),
        check: bool = False,
    ) -> None:
        """Start the ranks. name: of their log, by default the next that is free. check: the machine is checked before,
        by `running`; not with other nodes. The rest as for LocalJob.start.

        Raises NodeUnhealthy if a fault of this machine ended the attempt before.
        """
        self.first = share.first if share else 0
        if share is None and (fault := self.fault_of_machine()):  # with other nodes, the leader decides
            write_drained(self._folder, fault)
            raise unhealthy(fault, self._folder)
        if check:
            self.prepare("check.log")  # meanwhile
            self._check, self._checked = MachineCheck(self._folder, self._launch, self._say), (attempt, before)
            return
        if share is None:
            clear_endings(self._folder)
            overrides = self._layouts.begin(None, self.ranks)
        log = self._folder.logs / (name or next_log(self._folder))
        self._local.start(attempt=attempt, log=log, share=share, before=before, overrides=overrides)

    def prepared(self) -> bool:
        """Return whether the imports that `prepare` ordered are done. Before the first start."""
        self._local.running()
        return self._local.prepared

    @property
    def reports(self) -> int:
        """The file descriptor that can be read when a rank has ended."""
        return self._local.reports

    @property
    def port(self) -> int:
        """The port of the store of the ranks, if rank 0 is here."""
        return self._local.port

    @property
    def log(self) -> Path:
        return self._local.log

    @property
    def look_seconds(self) -> float:
        return self._watchdog.look_seconds

    @property
    def started(self) -> bool:
        return self._check is None

    @property
    def ranks(self) -> int:
        return self.job.processes

    def running(self) -> bool:
        if self._check is not None:
            if self._check.goes_on():
                return True
            (attempt, before), check = self._checked, self._check
            check.conclude(self.sickness, lambda sound: sound > 0)
            self._check = None
            self.start(attempt, replace(before, check=check.seconds))
        return self._local.running()

    def wait(self, seconds: float) -> None:
        if self._check is not None:
            self._check.wait(seconds)
        else:
            self._local.wait(seconds)

    def exit_codes(self) -> Mapping[int, int]:
        return self._local.exit_codes

    def ended_at(self, rank: int) -> float | None:
        return self._local.ended_at.get(rank)

    def endings(self) -> dict[int, RankEnding]:
        return read_endings(self._folder, ranks_of(self.job, self.first))

    def beats(self) -> dict[int, Beat]:
        """Return the newest heartbeat of each rank that runs."""
        ranks, codes = ranks_of(self.job, self.first), self.exit_codes()
        return {rank: self._local.heartbeats.read(rank - self.first) for rank in ranks if rank not in codes}

    def overdue(self) -> Hang | None:
        """Return the hang of these ranks, by their heartbeats alone. Suspects stay suspects until they go on."""
        hang = self._look()
        if hang is None and self._suspected:
            beats = self.beats()
            if all(beats.get(rank) == self._suspected.beats[rank] for rank in self._suspected.suspects):
                return self._suspected
        self._suspected = hang if hang and hang.suspects else None
        return hang

    def _look(self) -> Hang | None:
        hang = self._watchdog.look([rank - self.first for rank in self.exit_codes()])
        if hang is None or not self.first:
            return hang
        beats = {self.first + rank: beat for rank, beat in hang.beats.items()}
        return replace(hang, beats=beats, suspects=frozenset(self.first + rank for rank in hang.suspects))

    def fault_of_machine(self) -> HealthFinding | None:
        """Return the worst finding about this machine, if it may not go on; record what is new."""
        if self.health:
            for finding in self.health.news():
                record_alone(self._folder, finding, self.health.say)
                self.sickness.take(finding)
        return self.sickness.worst

    def planned_restart(self, slow: Mapping[int, SlowRank] = NONE_SLOW) -> PlannedRestart | None:
        return restart_for([self.fault_of_machine()])

    def hang(self) -> Hang | None:
        if self._check is not None:
            return None
        hang = self._look()
        if hang and hang.suspects:
            blamed = waits_for(hang.beats, question(hang.beats, None))
            return hang if blamed and blamed <= hang.suspects else None
        return hang

    def examine(self, hang: Hang, step: int) -> JobIncident:
        return incident_of(hang, *examine(hang, self._folder), step)

    def explain(self, step: int) -> JobIncident:
        return explain(
            AttemptEnd(
                ranks=self.job.processes,
                endings=self.endings(),
                dead=self.lost_ranks(),
                exit_codes=self.exit_codes(),
                step=step,
                last_words=self._local.last_words(),
                log=self._local.end_of_log(),
                server_code=self._local.server_code,
                oom_kills=self._local.oom_kills,
            )
        )

    def respond(self, incident: JobIncident) -> JobIncident:
        return self._layouts.respond(incident)

    def facts(self) -> dict:
        """Return what another machine needs to explain how these ranks ended, as plain values."""
        local = self._local
        return {
            "last_words": local.last_words(),
            "log": self.end_of_log()[-_LOG_CHARACTERS:],
            "server_code": local.server_code,
            "oom_kills": local.oom_kills,
        }

    def end_of_log(self) -> str:
        return self._local.end_of_log()

    def end_attempt(self, failed: Collection[int] = (), *, keep: bool = False) -> Collection[int]:
        here = ranks_of(self.job, self.first)
        self._local.end_attempt([rank - self.first for rank in failed if rank in here], keep=keep)
        return sorted(self._local.left)

    def kill(self) -> None:
        """Kill all processes of the job, from any thread, without touching the run folder. This process ends next, and
        the keeper of snapshots with it. Raises ResourceError if the kernel cannot end them."""
        self._local.kill()

    def close(self, *, keep_snapshots: bool = False) -> None:
        try:
            if self._check is not None:
                self._check.close()
            self._local.close()
        finally:
            if not keep_snapshots:
                end_keeper(os.getpid(), self._folder.root)

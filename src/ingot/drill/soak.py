"""Random faults for a long time: the run is trained again and again while they come, and compared each time. No torch.

The times between faults are exponential, so they come as in a Poisson process; kinds, ranks and places are drawn as
well. Several faults may come before the run has recovered from the first.
"""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

from ingot.drill.copied import DrillCopy
from ingot.drill.drill import copied_steps, remove_copy, write_result
from ingot.drill.fault import DrillFault, can_have
from ingot.drill.guarded import directed_place, directed_to_skip, facts_with, planted, train_guarded, with_settings
from ingot.drill.leaks import Growth
from ingot.drill.oracles import RunFacts, Verdicts, read_facts
from ingot.drill.plan import NEVER, STAYS
from ingot.drill.reference import train_reference
from ingot.drill.trial import DrillOutput, Trial
from ingot.drill.undisturbed import DrillReference
from ingot.errors import ConfigError, UsageError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.quarantine_record import read_quarantine
from ingot.schema.run_folder import RunFolder
from ingot.units import format_seconds, parse_seconds

_EVERY = "20s"
_ROUNDS = 4  # copies in the time of a soak, about
_SHORTEST, _LONGEST = 20.0, 300.0  # seconds of an undisturbed copy
_TOGETHER = 2  # faults before a new step is reached: a job that never gets farther is given up, with good reason


def soak_times(duration: str | None, every: str | None) -> tuple[float, float] | None:
    """Return the seconds of a soak and the mean seconds between its faults; None without a soak. Raises UsageError."""
    if duration is None:
        if every is not None:
            raise UsageError(
                "E-DRILL-SOAK",
                f"--every {every} is given without --soak",
                rule="--every is the mean time between the faults of a soak",
                fix="add --soak 10min, or leave --every out",
            )
        return None
    seconds, between = _seconds("--soak", duration), _seconds("--every", every if every is not None else _EVERY)
    if not seconds > between >= 1:
        raise UsageError(
            "E-DRILL-SOAK",
            f"--soak {duration} with a fault every {between:g} s",
            rule="the mean time between faults is at least a second, and shorter than the soak",
            fix="for example --soak 10min --every 20s",
        )
    return seconds, between


def _seconds(option: str, text: str) -> float:
    try:
        return parse_seconds(text)
    except ConfigError as error:
        raise UsageError(
            "E-DRILL-SOAK",
            f"{option} {text!r} is not a duration",
            rule="a duration has a unit",
            fix=f"{option} 90s, {option} 10min or {option} 1h",
        ) from error


class Soak:
    """A soak of `seconds`, with a fault every `every` seconds on average.

    verdicts: that get the findings. `rounds` counts the copies that were trained, `faults` the faults by kind, and
    `seconds` is the wall-clock time of all commands.
    """

    def __init__(
        self,
        reference: DrillReference,
        faults: Sequence[DrillFault],
        output: DrillOutput,
        *,
        seconds: float,
        every: float,
        seed: int,
        verdicts: Verdicts | None = None,
    ):
        self._reference, self._kinds, self._output = reference, list(faults), output
        self._random, self._every = Random(f"soak {seed}"), every
        self._end = time.monotonic() + seconds
        self._next = time.monotonic() + self._wait()
        self._last: DrillFault | None = None
        self._of_round, self._unrepaired = self._kinds, list[DrillFault]()
        self.verdicts, self.growth, self.faults = verdicts or Verdicts(), Growth(), Counter[str]()
        self.rounds, self.seconds, self.useful = 0, 0.0, 0.0

    def _wait(self) -> float:
        return self._random.expovariate(1 / self._every)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def play(self, place: Path) -> Path | None:
        """Train copies in the folders PLACE-1, PLACE-2 and so on until the soak is over. Returns the one that is red,
        which ends it and is kept; None if none is."""
        while not self.is_over:
            root = place.with_name(f"{place.name}-{self.rounds + 1}")
            if not self.play_round(root):
                return root
            remove_copy(root)
            remove_copy(directed_place(root))
        return None

    def play_round(self, root: Path) -> bool:
        """Train one copy to its end in the folder `root`, with the faults that come, and judge it. Returns whether all
        was right."""
        self.rounds += 1
        began, found, name = time.monotonic(), self.verdicts.findings, f"round {self.rounds}"
        run, codes = self._reference.run, set[int]()
        self._of_round, self._unrepaired = self._drawn(), []
        if any(fault.planted for fault in self._of_round):
            run = planted(run, root)
        for fault in self._of_round:
            run = fault.prepare(run, root) if fault.one_of else run
        with Trial(run, root, self._random, self.verdicts, output=self._output, name=name) as trial:
            trial.start()
            reached: list[int] = []  # the highest step at each fault
            while True:
                if trial.follow(lambda: self._is_due(trial, reached)):
                    codes |= self._inject(trial, reached)
                    continue
                code = trial.finish()
                if code == run.done_code and trial.step >= run.steps:
                    break
                trial.judge_end(code, codes.union(*(fault.codes | fault.may_end for fault in self._unrepaired)))
                if self.verdicts.findings > found:
                    break
                self._repair(trial, code)
                codes = set()
                trial.start()
            self.seconds += time.monotonic() - began
            times = max(len(trial.recoveries), 1)
            more = max((fault.more_redone(run.config) for fault in self._of_round), default=0)
            most = trial.most_redone(2 * times) + more * times
            facts, since = self._reference.facts, None
            if self.verdicts.findings == found:
                facts, since = self._expected(trial)
            if facts is not None:
                trial.judge_recovered(facts, most, since)
        self.useful += useful_seconds(trial.folder, run.steps)
        return self.verdicts.findings == found

    def _drawn(self) -> list[DrillFault]:
        """Return the faults that a round may have: of those that need settings of their own, one of each kind."""
        names = dict.fromkeys(fault.one_of for fault in self._kinds if fault.one_of)
        one_of = [self._random.choice([one for one in self._kinds if one.one_of == name]) for name in names]
        return [fault for fault in self._kinds if not fault.one_of or fault in one_of]

    def _repair(self, trial: Trial, code: int) -> None:
        """Undo the damage by which the command ended with `code`."""
        for fault in [one for one in self._unrepaired if code in one.codes]:
            fault.repair(trial)
            self._unrepaired.remove(fault)

    def _expected(self, trial: Trial) -> tuple[RunFacts | None, int | None]:
        """Return the facts of the undisturbed run, and None. If the copy trained otherwise from some step on, return
        those of a second copy that is directed to do so from its start, None if it failed, and that step: the copy may
        have trained it as the undisturbed run first, and then again."""
        faults, starts = trial.plan.faults(), trial.plan.starts()
        untrained = read_facts(trial.folder).untrained - self._reference.facts.untrained
        record = read_quarantine(trial.folder.quarantine)
        stays = (step for number, step in starts.items() if faults[number].kind in STAYS and step != NEVER)
        since = min((*stays, *untrained, *(one.step for one in record)), default=None)
        if since is None:
            return self._reference.facts, None
        for fault in self._unrepaired:
            fault.repair(trial)
        return directed_to_skip(trial, record), since

    def _is_due(self, trial: Trial, reached: Sequence[int]) -> bool:
        assert trial.launcher is not None
        if trial.trains:  # before, it has opened little
            self.growth.sample(trial.launcher.pid)
        now = time.monotonic()
        return self._next <= now < self._end and sum(step >= trial.reached for step in reached) < _TOGETHER

    def _inject(self, trial: Trial, reached: list[int]) -> frozenset[int]:
        """Wait until a random fault can come, and inject it. Returns the exit codes with which the command may end."""
        able = [one for one in self._of_round if one not in self._unrepaired]
        fault = self._random.choice([one for one in able if one is not self._last] or able)
        if not trial.follow(lambda: can_have(fault, trial)):
            return frozenset()
        reached.append(trial.reached)
        self._output.say(f"{time.strftime('%H:%M:%S')} {trial.name}, fault {self.faults.total() + 1}: {fault.injects}")
        fault.inject(trial)
        self._last, self._next = fault, time.monotonic() + self._wait()
        self.faults[fault.id] += 1
        self._unrepaired += [fault] if fault.one_of else []
        return fault.codes

    def result(self) -> dict:
        """Return the numbers of the soak, and judge what grew."""
        self.verdicts.judge("o7", "all rounds", self.growth.problem())
        slope = self.growth.memory_slope()
        return self.verdicts.as_json("RS34", 0) | {
            "rounds": self.rounds,
            "faults": dict(sorted(self.faults.items())),
            "useful_share": round(self.useful / self.seconds, 3) if self.seconds else None,
            "memory_mb_per_minute": None if slope is None else round(slope / 1e6, 3),
            "more_open_files": self.growth.files(),
            "more_listening_sockets": self.growth.ports(),
        }


def soaked(
    reference: DrillReference, faults: Sequence[DrillFault], root: Path, output: DrillOutput
) -> tuple[list[DrillFault], DrillReference]:
    """Return the faults that a soak of the run draws, and the undisturbed run with the settings that they need.

    Raises the errors of `train_guarded`.
    """
    config = copied_steps(reference)
    kinds = [fault for fault in faults if fault.soaks and not fault.needs(config)]
    settings = {key: value for fault in kinds for key, value in fault.settings(config).items()}
    if "guard.hash_every" in settings:
        settings["guard.max_damages"] = 0  # as many as come
    facts = facts_with(reference, settings, root, output)
    reference = replace(reference, run=with_settings(reference.run, settings), facts=facts)
    if any(fault.by_size for fault in kinds):
        reference = train_guarded(reference, root, output)
    return kinds, reference


def useful_seconds(folder: RunFolder, steps: int) -> float:
    """Return the time of the steps of a run that were kept, each counted once: `steps` times the median time between
    two steps of an attempt. A step that a fault stretched counts as any other."""
    log = read_events(folder.events, events.STEP, events.RUN_STARTED)
    each = [b["time"] - a["time"] for a, b in itertools.pairwise(log) if a["kind"] == b["kind"] == events.STEP]
    return steps * median(each) if each else 0.0


def soak(
    copy: DrillCopy,
    faults: Sequence[DrillFault],
    output: DrillOutput,
    *,
    seconds: float,
    every: float,
    steps: int = 0,
    seed: int = 0,
) -> dict:
    """Let random faults come for `seconds`, every `every` seconds on average. Returns the result as plain values; they
    are in its `drill.json` too. Raises the errors of `train_reference`."""
    began = time.monotonic()
    length = min(max(seconds / _ROUNDS, _SHORTEST), _LONGEST)
    reference = train_reference(copy, output, steps=steps, seconds=length)
    kinds, reference = soaked(reference, faults, copy.root, output)
    session = Soak(reference, kinds, output, seconds=seconds, every=every, seed=seed)
    if red := session.play(copy.root / "round"):
        output.say(f"  evidence   {red}; the undisturbed run is {copy.root / 'reference'}")
    return write_result(copy, reference, [session.result()], seed=seed, began=began)


def soak_lines(result: dict) -> list[str]:
    """Return the result of a soak for people."""
    (line,) = result["rows"]
    kinds = ", ".join(f"{name} {count}" for name, count in line["faults"].items())
    slope, share = line["memory_mb_per_minute"], line["useful_share"]

    def median_of(key: str) -> str:
        return "never" if line[key] is None else f"after {format_seconds(line[key])}"

    memory = "measured for too short a time" if slope is None else f"{slope:+.2f} MB per minute"
    lines = [
        f"faults     {sum(line['faults'].values())} in {line['rounds']} copies: {kinds or 'none'}",
        f"medians    detected {median_of('detect_s')}, recovered {median_of('recover_s')}",
        f"useful     {'-' if share is None else f'{share:.0%}'} of the time went into steps that were kept",
        f"launchers  memory {memory}, {line['more_open_files']} more open files, "
        f"{line['more_listening_sockets']} more listening sockets",
        *(f"wrong      {finding}" for finding in line["wrong"]),
    ]
    same = "every copy ended with the bits of the undisturbed run" if not result["red"] else "RED"
    return [*lines, f"soak       {format_seconds(result['seconds'])}: {same}"]

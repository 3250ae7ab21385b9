"""Damage of a run's state or gradients that hashes found: reported, undone by the newest checkpoint, and judged once
the steps since then were trained again."""

import math
import os
import socket
import time
from collections.abc import Sequence

import numpy as np

from ingot.errors import RunFailed
from ingot.events import read_events
from ingot.machine.health.report import HealthReport, node_name
from ingot.machine.health.report_file import add_report
from ingot.plugins.callback import StepNumbers
from ingot.schema import events
from ingot.schema.checkpoint import FULL
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.guard.step_judge import CORRUPTION, KINDS, NORM_NOT_FINITE, without_overflow
from ingot.trainer.integrity.verdict import Damage, OwnGradients, ReplayVerdict, Trust, ended, firsts, judge, repeated
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.mesh.collectives import any_rank, gather_from
from ingot.trainer.mesh.environment import SUPERVISOR_VARIABLE
from ingot.trainer.parts import RunParts
from ingot.trainer.save import reload, report_roll_back

_DRAIN_SECONDS = 30.0  # that ranks wait for their launcher to end them, so that it can drain the machine
_DAMAGE = "damage"
_SIGNS = {
    Trust.OWN_HASH: "own_hash",
    Trust.MINORITY: "minority",
    Trust.RECOMPUTED_ALONE: "recomputed_alone",
    Trust.UNDECIDED: "undecided",
    Trust.RECOMPUTED: "recomputed",
}


def replace_damaged(trainer: RunParts, step: int) -> int:
    """Report the damage that was found at the log line of `step`, load the newest checkpoint, and return its step.
    Collective.

    Every checkpoint was saved after a comparison of its own, so the newest one is from before the damage. Raises
    RunFailed if the same rank was damaged before, in the same steps, or the run went back too often for damage, and as
    `reload`.
    """
    hashes, ranks = _hashes(trainer), range(trainer.place.world_size)
    changed = hashes.changed()
    own, gradients = hashes.suspicion(), hashes.own_gradients()
    rows = gather_from(ranks, np.array([own.trust, own.step, changed, *gradients], dtype=np.float64))
    damage = judge([(Trust(int(trust)), int(at)) for trust, at, *_ in rows])
    if trainer.place.rank in damage.ranks:
        facts = {"tensor": own.tensor, "element": own.element, "bit": own.bit, "sign": _SIGNS[damage.trust]}
        host, rank = socket.gethostname(), trainer.place.rank
        trainer.event_log.write(events.STATE_DAMAGED, step=damage.step, rank=rank, host=host, **facts)
    what = "gradients" if damage.of_gradients else "state"
    trainer.say(f"damaged   the {what} of {_named(trainer, damage.ranks, damage.is_named)} at step {damage.step}")
    if (before := hashes.replayed) is not None:
        replayed = repeated(before, damage, rows[:, 2].astype(bool).tolist(), _firsts(before, rows[:, 3:]))
        _report(trainer, before, replayed)
        if replayed.verdict == "persistent":
            _end(trainer, damage, replayed)
    _require_few(trainer, damage)
    back_at = reload(trainer)
    hashes.replay(damage, back_at)
    trainer.schedule.failed(FULL)  # the save that was due at this line comes soon
    report_roll_back(trainer, step, back_at, _DAMAGE, "its state was compared when it was saved")
    return back_at


def look_closer(trainer: RunParts, line: Sequence[StepNumbers]) -> bool:
    """Compare the state if a step of `line`, the last log line, looks like damage, and let the gradients of the next
    step be computed twice: hashes are due in a few steps only. Return whether some rank is damaged.

    Where ranks have copies, they are compared after every finding: a high bit of a weight makes the loss of its rank
    large, and the guard would go back for it and name nobody. Collective. All ranks decide alike, by the numbers of the
    line and by what they agreed on at the start.
    """
    signs = (CORRUPTION,) if trainer.loss_scale else (CORRUPTION, NORM_NOT_FINITE)  # in fp16, an overflow is no sign
    kinds = {KINDS[sign] for sign in signs}
    line = [without_overflow(one) for one in line] if trainer.loss_scale else line
    suspected = [one.step for one in line if one.finding and kinds & {*one.finding.kinds} and math.isfinite(one.loss)]
    if (hashes := trainer.hashes) is None:
        return False
    if not suspected:
        if not hashes.has_copies or not any(one.finding for one in line):
            return False
        hashes.hash_now(line[-1].step)
        hashes.compare()
        return any_rank(hashes.read())
    trainer.say(f"suspected step {suspected[0]} has a sign of damage, {_closer(hashes)}")
    hashes.suspect_damage(line[-1].step)
    hashes.compare()
    is_damaged = any_rank(hashes.read())
    if hashes.has_copies and not is_damaged:
        trainer.say(f"compared  the state after step {line[-1].step} is equal on all ranks that have copies: no damage")
    return is_damaged


def _closer(hashes: StateHashes) -> str:
    """Return what the run does about a sign of damage, as the rest of a sentence."""
    if hashes.has_copies:
        return "or of a learning rate that is too high: the hashes of the state are compared"
    again = "; the gradients of the next step are computed twice" if hashes.gradients is not None else ""
    return (
        "or of a learning rate that is too high; nothing is compared: no rank has a copy of the state of another one "
        f"(parallel.dp_replicate makes them){again}"
    )


def judge_replayed(trainer: RunParts, step: int) -> None:
    """Report what the steps show that were trained again because of damage, if `step` is the last of them and its log
    line found no damage. Collective."""
    hashes = trainer.hashes
    if hashes is None or (damage := hashes.replayed) is None or step < damage.step:
        return
    changed, first = [False] * trainer.place.world_size, []
    if not damage.is_named:
        own = np.array([hashes.changed(), *hashes.own_gradients()], dtype=np.float64)
        rows = gather_from(range(trainer.place.world_size), own)
        changed, first = rows[:, 0].astype(bool).tolist(), _firsts(damage, rows[:, 1:])
    hashes.end_replay()
    _report(trainer, damage, ended(damage, changed, first))


def _firsts(damage: Damage, rows: np.ndarray) -> list[int]:
    """Return for each rank the first step whose own gradients changed when it was trained again, if that says whose
    state is damaged: wrong gradients need not be among those that are sampled. rows: the OwnGradients of each rank."""
    return [] if damage.of_gradients else firsts([OwnGradients(*map(int, row)) for row in rows], damage.ranks)


def _require_few(trainer: RunParts, damage: Damage) -> None:
    """Raise RunFailed if the run, with all its attempts, went back guard.max_damages times because of damage."""
    most, recorded = trainer.config.guard.max_damages, read_events(trainer.folder.events, events.ROLLED_BACK)
    times = from_rank_zero(lambda: sum(event.get("reason") == _DAMAGE for event in recorded))
    if not most or times < most:
        return
    raise RunFailed(
        "E-DAMAGE-LIMIT",
        f"the state or the gradients of {_named(trainer, damage.ranks, damage.is_named)} are damaged at step "
        f"{damage.step}, and the run went back {times} times because of damage",
        rule=f"a run goes back at most {most} times because of damage (guard.max_damages), all attempts together: "
        "sound machines damage a bit in months",
        fix="exclude the machines that the events state_damaged name; `ingot doctor` looks for faults. Then run the "
        f"same command with --set guard.max_damages={2 * most}: it continues from the newest checkpoint",
        ranks=list(damage.ranks),
        step=damage.step,
        times=times,
    )


def _report(trainer: RunParts, damage: Damage, replayed: ReplayVerdict) -> None:
    ranks, verdict = list(replayed.ranks), replayed.verdict
    trainer.log(events.STATE_REPLAYED, step=damage.step, ranks=ranks, named=replayed.is_named, verdict=verdict)
    if verdict != "other":
        who = _named(trainer, replayed.ranks, replayed.is_named)
        trainer.say(f"damaged   {verdict}: {who}, at step {damage.step}, as the same steps show when trained again")


def _end(trainer: RunParts, damage: Damage, replayed: ReplayVerdict) -> None:
    """End the run, or let the launcher go on without the machine of the damaged rank. Raises RunFailed."""
    ranks, drains = replayed.ranks, trainer.config.launch.on_bad_health == "drain"
    if replayed.is_named and drains and SUPERVISOR_VARIABLE in os.environ:
        if trainer.place.rank in ranks:
            what = "gradients" if damage.of_gradients else "state"
            words = f"rank {trainer.place.rank}: damage of its {what}, again and again"
            add_report(trainer.folder.health_reports, HealthReport(kind="wrong_state", words=words, node=node_name()))
        time.sleep(_DRAIN_SECONDS)  # the launcher ends this process
    who = _named(trainer, ranks, replayed.is_named)
    if damage.of_gradients:
        raise _wrong_gradients(damage, replayed, who)
    raise RunFailed(
        "E-STATE-DAMAGED",
        f"weights or optimizer state of {who} changed without an update at step {damage.step}, and again when "
        "the steps were trained again",
        rule="between two updates no bit of the state changes, and copies of it are equal; a machine that breaks this "
        "twice in the same steps has a fault",
        fix="exclude the machine and run the same command again: it continues from the newest checkpoint, which is "
        "from before the damage. `ingot doctor` looks for faults of a machine",
        ranks=list(ranks),
        step=damage.step,
    )


def _wrong_gradients(damage: Damage, replayed: ReplayVerdict, who: str) -> RunFailed:
    return RunFailed(
        "E-GRADIENTS-DAMAGED",
        f"{who} computed other gradients of step {damage.step} than another rank, and again when the steps were "
        "trained again",
        rule="ranks compute the same bits from the same weights and tokens (guard.recompute_every); a machine that "
        "computes others twice in the same steps has a fault",
        fix="exclude the machine and run the same command again: it continues from the newest checkpoint. "
        "`ingot doctor` looks for faults of a machine",
        ranks=list(replayed.ranks),
        step=damage.step,
    )


def _named(trainer: RunParts, ranks: Sequence[int], is_named: bool) -> str:
    """Return ranks with their hosts, for people."""
    hosts = {e["rank"]: e["host"] for e in read_events(trainer.folder.events, events.RANK_STARTED)}
    each = [f"rank {rank} on {hosts.get(rank, 'an unknown host')}" for rank in ranks]
    return (" and " if is_named else " or ").join(each)


def _hashes(trainer: RunParts) -> StateHashes:
    assert trainer.hashes is not None, "only hashes find damage"
    return trainer.hashes

"""What went wrong, how the run came back, and the proof that it made no difference."""

import time

from ingot.report.facts import Facts
from ingot.report.incidents import Incident
from ingot.report.render.page import Block, Pairs, Section, Text, Tile
from ingot.units import format_seconds


def recovery_tile(facts: Facts) -> Tile | None:
    """One figure for the headline: recovered or not, in how many seconds, with the same bits or not."""
    if not facts.incidents:
        return None
    resumed = [i for i in facts.incidents if i.resumed_at is not None]
    count = len(facts.incidents)
    if len(resumed) < count:
        return Tile("Recovery", f"{len(resumed)} of {count}", "the last fault ended the run", good=False)
    note = f"after {count} fault{'s' if count > 1 else ''}"
    good = None
    if facts.twin:
        good = facts.twin.equal
        note += ", losses equal bit for bit" if good else ", losses differ from the undisturbed run"
    return Tile("Recovered in", format_seconds(max(i.recover_seconds or 0.0 for i in resumed)), note, good=good)


def recovery_section(facts: Facts) -> Section | None:
    """Every incident, and the comparison with the undisturbed twin if there was one."""
    blocks: list[Block] = []
    for incident in facts.incidents[:20]:
        blocks.append(Text(_account(incident)))
        blocks.append(Pairs(_figures(incident)))
    if len(facts.incidents) > 20:
        blocks.append(Text(f"{len(facts.incidents) - 20} more faults are in the event log."))
    if facts.twin:
        twin = facts.twin
        verdict = "equal, bit for bit" if twin.equal else f"different by up to {twin.max_difference:.3g}"
        blocks.append(
            Text(
                f"A twin ran steps {twin.first_step:,} to {twin.last_step:,} without a fault, from an earlier "
                f"checkpoint and through step {twin.resumed_from:,}, where this run had to start again after the kill "
                f"at step {twin.kill_step:,}. Losses and gradient norms of the two are {verdict}."
            )
        )
        blocks.append(
            Pairs(
                [
                    ("Steps compared", f"{twin.steps:,}"),
                    ("Largest difference", f"{twin.max_difference:g}"),
                    ("Verdict", "equal" if twin.equal else "not equal"),
                ]
            )
        )
    return Section("recovery", "Faults and recovery", blocks) if blocks else None


def _account(incident: Incident) -> str:
    who = "the job" if incident.rank is None else f"rank {incident.rank}"
    on_purpose = ", on purpose" if incident.injected_at is not None else ""
    clock = time.strftime("%H:%M:%S UTC", time.gmtime(incident.injected_at or incident.detected_at))
    lost = f"At {clock}, near step {incident.fault_step:,}, {who} {incident.cause.rstrip('.')}{on_purpose}."
    if incident.resumed_from is None:
        return f"{lost} The run did not go on afterwards."
    place = f"the checkpoint of step {incident.resumed_from:,}" if incident.resumed_from else "the beginning"
    return f"{lost} All ranks started again from {place}."


def _figures(incident: Incident) -> list[tuple[str, str]]:
    rows = []
    if incident.detect_seconds is not None:
        rows.append(("Noticed after", format_seconds(incident.detect_seconds)))
    if incident.recover_seconds is not None:
        rows.append(("Training again after", format_seconds(incident.recover_seconds)))
    if incident.redone_steps is not None:
        rows.append(("Steps done again", f"{incident.redone_steps:,}"))
    if incident.compared_steps:
        equal = "all with the same bits" if incident.compared_equal else "not all with the same bits"
        rows.append(("Of these logged both times", f"{incident.compared_steps:,}, {equal}"))
    return rows

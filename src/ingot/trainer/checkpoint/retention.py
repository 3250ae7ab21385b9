"""The rule that decides which checkpoints of a tier stay, on the local disk and in the store. No torch."""

from collections.abc import Callable, Iterable

from ingot.schema.guard_record import proven_to


def retained(
    steps: Iterable[int],
    *,
    keep: int,
    keep_every: int,
    pinned: set[int],
    is_sound: Callable[[int], bool],
    is_suspect: Callable[[int], bool],
    back_to: Iterable[int] = (),
    proven_steps: int = 0,
) -> dict[int, str]:
    """Return step -> why its checkpoint stays, "" if it goes, newest first.

    The newest `keep` stay (0: all), every one whose step is a multiple of `keep_every` (0: none), and pinned ones. Only
    sound checkpoints count among the newest, and suspect ones are counted alone, up to `keep` as well: they never
    displace others. So the newest sound checkpoint always stays. back_to: up to these steps the guard may have to go
    back. proven_steps: so many steps of training show that the weights before them are sound (0: none is needed). Of
    each, the newest sound checkpoint that is old enough stays: for trouble in the next step, which the step before it
    may have begun. Until a newer one has these steps after it, the oldest that is on its way there stays, too.
    is_sound, is_suspect: called for those steps only where the answer matters, because each looks at files.
    """
    kept = {False: 0, True: 0}  # whether suspect -> number
    ordered = sorted(steps, reverse=True)
    newest = next((one for one in ordered if not is_suspect(one) and is_sound(one)), 0) if proven_steps else 0
    proven = proven_to(newest + 1, proven_steps, 0)
    waits = next((one for one in reversed(ordered) if one > proven and not is_suspect(one) and is_sound(one)), 0)
    waits = waits if proven_steps else 0
    wanted = {last: f"the newest up to step {last}: the guard found trouble after it" for last in back_to}
    wanted[proven] = f"the newest with {proven_steps} steps after it"
    reasons: dict[int, str] = {}
    for step in ordered:
        full = keep > 0 and (kept[False] >= keep or kept[is_suspect(step)] >= keep)
        counts = not full and is_sound(step)
        if counts:
            kept[is_suspect(step)] += 1
        due = [last for last in wanted if step <= last]
        older = due and not is_suspect(step) and is_sound(step)
        needed = [wanted.pop(last) for last in due] if older else []
        if step in pinned:
            reasons[step] = "pinned"
        elif counts:
            reasons[step] = f"one of the newest {keep}" if keep else "all are kept"
        elif needed:
            reasons[step] = needed[0]
        elif step == waits:
            reasons[step] = f"the next with {proven_steps} steps after it"
        elif keep_every and step % keep_every == 0:
            reasons[step] = f"its step is a multiple of {keep_every}"
        else:
            reasons[step] = "" if full else "it cannot be used, and newer ones do not fill the number to keep"
    return reasons

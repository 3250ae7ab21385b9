"""The rule that decides which checkpoints of a tier stay, on the local disk and in the store. No torch."""

from collections.abc import Callable, Iterable


def retained(
    steps: Iterable[int],
    *,
    keep: int,
    keep_every: int,
    pinned: set[int],
    is_sound: Callable[[int], bool],
    is_suspect: Callable[[int], bool],
    trouble: int = 0,
) -> dict[int, str]:
    """Return step -> why its checkpoint stays, "" if it goes, newest first.

    The newest `keep` stay (0: all), every one whose step is a multiple of `keep_every` (0: none), and pinned ones. Only
    sound checkpoints count among the newest, and suspect ones are counted alone, up to `keep` as well: they never
    displace others. So the newest sound checkpoint always stays. trouble: the step before which the guard may have to
    go back (0: none); the newest sound checkpoint before it stays. is_sound, is_suspect: called for those steps only
    where the answer matters, because each looks at files.
    """
    kept = {False: 0, True: 0}  # whether suspect -> number
    reasons, needs_older = {}, trouble > 0
    for step in sorted(steps, reverse=True):
        full = keep > 0 and (kept[False] >= keep or kept[is_suspect(step)] >= keep)
        counts = not full and is_sound(step)
        if counts:
            kept[is_suspect(step)] += 1
        older = needs_older and step < trouble and not is_suspect(step) and is_sound(step)
        needs_older = needs_older and not older
        if step in pinned:
            reasons[step] = "pinned"
        elif counts:
            reasons[step] = f"one of the newest {keep}" if keep else "all are kept"
        elif older:
            reasons[step] = f"the newest before step {trouble}, from where the guard found trouble"
        elif keep_every and step % keep_every == 0:
            reasons[step] = f"its step is a multiple of {keep_every}"
        else:
            reasons[step] = "" if full else "it cannot be used, and newer ones do not fill the number to keep"
    return reasons

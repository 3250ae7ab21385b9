"""Many damaged places, told in one error."""

from collections.abc import Iterable

from ingot.errors import DataError

LISTED = 20  # places that are named one by one


class Damaged(DataError):
    """Several `places` at once."""

    places: tuple[DataError, ...] = ()


def raise_all(damage: Iterable[DataError]) -> None:
    """Raise one DataError that lists every place in `damage` (the first 20, and a count); nothing when there is none.

    A single one is raised as it is. Of several, each rule and each way out is told once.
    """
    places = [place for one in damage for place in (one.places if isinstance(one, Damaged) else (one,))]
    found = list({place.found: place for place in places}.values())  # two checks may meet the same damage
    if len(found) == 1:
        raise found[0]
    if not found:
        return
    listed = [f"  {one.found}" for one in found[:LISTED]]
    if len(found) > LISTED:
        listed.append(f"  and {len(found) - LISTED:,} more")
    error = Damaged(
        "\n".join([f"{len(found):,} places are damaged:", *listed]),
        rule="; ".join(dict.fromkeys(one.rule for one in found[:LISTED] if one.rule)),
        fix="; ".join(dict.fromkeys(one.fix for one in found[:LISTED] if one.fix)),
    )
    error.places = tuple(found)
    raise error

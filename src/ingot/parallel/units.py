"""Units: parameters that are gathered and reduced together, and how their rows are dealt to the ranks that share them.

Both forms of data parallelism (zero.py, fsdp.py) cut a stage into the same units and deal rows the same way.
"""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Unit:
    """modules: what runs with these parameters, first one first. names: of all its parameters, within the stage."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]


def cut_units(stage: nn.Module, unit_layers: int) -> list[Unit]:
    """In the order of the forward: what lies outside of blocks (embedding, last norm, head), then groups of blocks.

    unit_layers: blocks in a group; 0 makes the whole stage one unit.
    """
    blocks = dict(stage.get_submodule("blocks").named_children())
    names = [name for name, _ in stage.named_parameters()]
    if unit_layers == 0:
        return [Unit((stage,), tuple(names))]
    outside = tuple(name for name in names if not name.startswith("blocks."))
    keys = list(blocks)
    groups = [keys[i : i + unit_layers] for i in range(0, len(keys), unit_layers)]
    units = [Unit((stage,), outside)] if outside else []
    for group in groups:
        inside = tuple(n for n in names if n.startswith(tuple(f"blocks.{key}." for key in group)))
        units.append(Unit(tuple(blocks[key] for key in group), inside))
    return units


def own_rows(rows: int, ranks: int, index: int) -> range:
    """Rows of a matrix that rank `index` of `ranks` owns: equal parts, rounded up; the last ranks may have fewer."""
    part = -(-rows // ranks)
    return range(min(index * part, rows), min((index + 1) * part, rows))

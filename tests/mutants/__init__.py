"""Faults planted in the source, one at a time, and the tests that must see each: a proof of the tests themselves.

    make mutants                        all of them
    make mutants NAMES="rotary zero"    those whose name contains one of these words

A new guard or proof comes with its mutant: an entry in the file of its area. docs/mutants.md is the manual.
"""

from . import (
    api,
    board,
    checkpoint,
    commands,
    convert,
    damaged_data,
    data,
    disks,
    doubt,
    drill,
    evaluations,
    guard,
    guards_off,
    health,
    integrity,
    lease,
    loader,
    metrics,
    model,
    nodes,
    optim,
    parallel,
    partial,
    parts,
    planner,
    plugin_imports,
    plugins,
    precision,
    replay,
    replicas,
    run_folder,
    saves,
    spike,
    start_times,
    stopping,
    stores,
    stragglers,
    watchdog,
)
from .mutant import Mutant

AREAS: dict[str, list[Mutant]] = {
    area.__name__.rpartition(".")[2]: area.MUTANTS
    for area in (
        model,
        parallel,
        optim,
        loader,
        damaged_data,
        board,
        guards_off,
        checkpoint,
        evaluations,
        commands,
        convert,
        data,
        disks,
        doubt,
        drill,
        planner,
        precision,
        api,
        plugins,
        plugin_imports,
        parts,
        partial,
        stores,
        lease,
        replicas,
        stopping,
        run_folder,
        saves,
        start_times,
        stragglers,
        metrics,
        watchdog,
        nodes,
        guard,
        health,
        replay,
        integrity,
        spike,
    )
}
ALL: list[Mutant] = [mutant for mutants in AREAS.values() for mutant in mutants]

"""All layouts of a space, each worked out in full: what the search has to agree with where there are few of them."""

from collections.abc import Iterator

from ingot.planner.search.candidates import Candidate, Evaluator
from ingot.planner.search.space import Space
from ingot.schema.run import RunConfig


def every_layout(evaluator: Evaluator, space: Space) -> Iterator[RunConfig]:
    """Legal ones, whether they fit or not."""
    for mesh in space.meshes():
        for sharding in space.shardings(mesh):
            for micro_batch in space.micro_batches(sharding):
                micro_batches = evaluator.laid_out(sharding, micro_batch).accumulation
                for scheduled in space.schedules(sharding, micro_batches):
                    for parallel in space.recomputes(scheduled):
                        run = evaluator.laid_out(parallel, micro_batch)
                        if evaluator.legal(run):
                            yield run


def every_candidate(evaluator: Evaluator, space: Space) -> Iterator[Candidate]:
    """Those that fit."""
    for run in every_layout(evaluator, space):
        if evaluator.fits(run):
            yield evaluator.candidate(run)

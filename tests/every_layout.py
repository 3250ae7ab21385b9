"""Every layout of a space, each worked out in full: the answer that the search has to agree with on small spaces."""

from collections.abc import Iterator

from ingot.planner.search.candidates import Candidate, Evaluator
from ingot.planner.search.space import Space
from ingot.schema.run import RunConfig


def every_layout(evaluator: Evaluator, space: Space) -> Iterator[RunConfig]:
    """Yield each legal layout, whether it fits in memory or not."""
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
    """Yield a candidate for each legal layout that fits in memory."""
    return (evaluator.candidate(run) for run in every_layout(evaluator, space) if evaluator.fits(run))

"""Python's collector of garbage by hand: it runs between steps, after the same ones on all ranks.

Left alone, it runs when a thread makes the object that is one too many: in the middle of a step, and on each rank in
another one, so that the others wait. A step makes little for it (selective recomputation: about a hundred small objects
for each forward of a block) and no tensors (a test counts them), so memory of the device does not wait for it.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FULL_EVERY = 100  # steps; objects that outlived a step are garbage only after a save, an evaluation or a return


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Keep the collector off, and give the function to call after each step, with its number.

    It collects what was made since the last call; after every FULL_EVERY-th step, all there is. Objects that exist now
    are left out, unless the process has frozen its own: a fork server has, and the model has to be freed later.
    """
    was_enabled, freezes = gc.isenabled(), gc.get_freeze_count() == 0
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield _collect
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _collect(step: int) -> None:
    gc.collect(2 if step % FULL_EVERY == 0 else 1)

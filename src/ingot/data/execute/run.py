"""Tasks to a runner, and what people see meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingot.data.execute.task import Store, Task, run_task


@dataclass(frozen=True)
class Status:
    """done, total: tasks, those found finished included. records: of all attempts that ended or run in this call.

    counts: sums of what the tasks that run or ran in this call said ("kept", drop rules).
    """

    done: int
    total: int
    records: int = 0
    counts: dict[str, int] = field(default_factory=dict)


Watch = Callable[[Status], None]


class Runner(Protocol):
    """Does tasks, in any order and any number at once, by calling `run_task` somewhere."""

    def run(self, tasks: Sequence[Task], store: Store, watch: Callable[[int], None]) -> None:
        """Return when every task is finished in `store`. watch(tasks done) is called about twice a second.

        Raises what a task raised (others may go on to their end first); DataError when a task cannot be done.
        """
        ...


class Inline:
    """One task after the other, in this process."""

    def run(self, tasks: Sequence[Task], store: Store, watch: Callable[[int], None]) -> None:
        for number, task in enumerate(tasks):
            run_task(task, store)
            watch(number + 1)


def run_all(tasks: Sequence[Task], store: Store, runner: Runner, watch: Watch | None = None) -> list[Any]:
    """The results of `tasks`, in their order. Finished ones are not done again."""
    missing = [task for task in tasks if not store.finished(task)]
    before = len(tasks) - len(missing)
    if missing:
        runner.run(missing, store, lambda done: watch(Status(before + done, len(tasks))) if watch else None)
    if watch:
        watch(Status(len(tasks), len(tasks)))
    return [store.result(task) for task in tasks]

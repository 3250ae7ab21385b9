"""The order in which workers of pytest-xdist get the files of tests: one of them waits, and long files come first."""

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Tests that wait for starts, kills and pages most of the time: the first worker has them, and computes when none is
# left; the others compute, and help with them at the end.
WAIT = (
    "tests/e2e/",
    "tests/golden/",
    "tests/web/",
    "tests/unit/data/tasks/",
    "tests/unit/observe/test_feed.py",
    "tests/unit/trainer/fleet/",
    "tests/unit/trainer/launch/",
)
# Seconds of one test, roughly: only the order depends on them. The first beginning of a file's name that fits counts.
SECONDS = (
    ("tests/board/", 15),
    ("tests/e2e/", 8),
    ("tests/unit/api/test_train_here.py", 1.5),
    ("tests/unit/trainer/test_stragglers.py", 5),
    ("tests/unit/trainer/integrity/", 2),
    ("tests/unit/trainer/guard/test_guarded_runs.py", 2),
    ("tests/golden/", 2),
    ("tests/public_bugs/", 2),
    ("tests/unit/trainer/launch/", 1),
    ("tests/unit/rehearse/", 1),
    ("tests/unit/plugins/test_data_build.py", 1),
    ("tests/web/", 1),
    ("tests/dist/", 0.7),
    ("tests/proof/", 0.5),
    ("tests/unit/observe/test_feed.py", 0.5),
    ("tests/unit/trainer/", 0.4),
    ("tests/unit/data/tasks/", 0.4),
    ("tests/mutants/", 0.3),
    ("tests/", 0.05),
)


# Files that share what takes seconds to make: the syntax of all files, the run of the command.
TOGETHER = {
    "tests/unit/test_errors.py": "tests/unit/test_house.py",
    "tests/unit/api/test_trainer.py": "tests/unit/api/test_train_here.py",
}


class ByFile(LoadScopeScheduling):
    """Keeps the tests of a file on one worker, so that their shared fixtures are made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return TOGETHER.get(file, file)

    def _assign_work_unit(self, node: WorkerController) -> None:
        waits = node is self.nodes[0]
        file = max(self.workqueue, key=lambda file: (file.startswith(WAIT) == waits, self._seconds(file)))
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

    def _seconds(self, file: str) -> float:
        each = next((seconds for beginning, seconds in SECONDS if file.startswith(beginning)), 0.0)
        return each * len(self.workqueue[file])

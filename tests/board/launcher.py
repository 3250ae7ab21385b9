"""A process that has imported the trainer once, and forks attempts of a run with one rank from itself.

`python -m tests.board.launcher` reads one JSON object per line: the run file, the run folder, settings,
those whose change is confirmed, the environment and the file for the output. Each attempt is
`ingot.trainer.launch.train` in a forked child, with lock, checks and resume as `ingot train` has them, but without a
supervisor: a killed attempt stays killed. The answer is {"code": exit code, negative for a signal}.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Serve until standard input is closed."""
    import torch

    from ingot.trainer.launch import here, train  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        parent, pid = os.getpid(), os.fork()
        if not pid:
            os._exit(_attempt(order, parent))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code}), flush=True)


def _attempt(order: dict, parent: int) -> int:
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for fd, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(file, fd)
    os.environ.update(order["env"] | {"BOARD_TOP": str(parent)})
    from ingot.errors import IngotError
    from ingot.trainer.given import given_callbacks
    from ingot.trainer.launch.train import train

    given = given_callbacks([lambda numbers: None])  # with a function, a run with one rank trains in this process
    run_file, out = Path(order["run_file"]), Path(order["out"])
    more = {"overrides": order["settings"], "accept": order["accept"], "until_step": order["until"]}
    try:
        say = lambda text: print(text, flush=True)  # noqa: E731
        return train(run_file, out, **more, given=given, say=say).exit_code
    except IngotError as error:
        print(f"{error.code}: {error}", flush=True)
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return 70


if __name__ == "__main__":
    main()

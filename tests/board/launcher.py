"""A process that has imported the trainer once, and forks attempts of a run from itself.

`python -m tests.board.launcher` reads one JSON object per line: the run file, the run folder, settings, those whose
change is confirmed, the environment and the file for the output. An attempt with one rank is
`ingot.trainer.launch.train` in a forked child, with lock, checks and resume as `ingot train` has them, but without a
supervisor: a killed attempt stays killed. With several ranks, the child is an agent as torchrun's, which forks them and
kills all if one fails. The answer is {"code": exit code, negative for a signal}.

With "restarts", a fault ends a rank and its writer alone, not the agent: it starts all ranks again, without the fault,
and adds the newest checkpoint of that time to a file: an object per line with its step, and why it cannot be used.
"""

import gc
import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

_DONE, _STOPPED, _FAILED = 0, 10, 70


def main() -> None:
    """Serve until standard input is closed."""
    import torch

    from ingot.trainer.launch import here, own_loop, train  # noqa: F401

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
    try:
        return _agent(order) if order["ranks"] > 1 else _alone(order)
    except BaseException:
        traceback.print_exc()
        return _FAILED


def _alone(order: dict) -> int:
    from ingot.errors import IngotError
    from ingot.trainer.given import given_callbacks
    from ingot.trainer.launch.train import train

    given = given_callbacks([lambda numbers: None])  # with a function, a run with one rank trains in this process
    run_file, out = Path(order["run_file"]), Path(order["out"])
    more = {"overrides": order["settings"], "accept": order["accept"], "until_step": order["until"]}
    try:
        return train(run_file, out, **more, given=given, say=_say).exit_code
    except IngotError as error:
        print(f"{error.code}: {error}", flush=True)
        return error.exit_code


def _agent(order: dict) -> int:
    if order["restarts"]:
        os.environ["BOARD_TOP"] = str(os.getpid())
    code = _FAILED
    for attempt in range(1 + order["restarts"]):
        listener = socket.create_server(("127.0.0.1", 0))
        pids = set()
        for number in range(order["ranks"]):
            pid = os.fork()
            if not pid:
                os._exit(_rank(order, number, listener, attempt))
            pids.add(pid)
        listener.close()
        if not (code := _end_of(pids)):
            return _STOPPED if order["until"] else _DONE
        os.environ.pop("BOARD_WHO", None)  # the fault comes once
        _record_between(order)
    return code


def _end_of(pids: set[int]) -> int:
    """Wait for all ranks. Returns 0, or the code of the first that failed, after which the others are killed."""
    failed = 0
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if not failed and (failed := os.waitstatus_to_exitcode(status)):
            for other in pids:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return failed


def _record_between(order: dict) -> None:
    from ingot.schema.run_folder import RunFolder

    from .row import newest_valid

    step, torn = newest_valid(RunFolder(Path(order["out"])))
    with Path(f"{order['log']}.between").open("a") as file:
        file.write(json.dumps({"step": step, "torn": torn}) + "\n")


def _rank(order: dict, number: int, listener: socket.socket, attempt: int) -> int:
    import ingot
    from ingot.errors import IngotError
    from ingot.machine.processes import die_with_parent
    from ingot.trainer.mesh.start import enter_rank

    die_with_parent()
    enter_rank(number, order["ranks"], listener)
    os.environ.update({"TORCHELASTIC_RUN_ID": "board", "TORCHELASTIC_RESTART_COUNT": str(attempt)})
    more = {"overrides": order["settings"], "accept": order["accept"], "until_step": order["until"]}
    try:
        with ingot.Trainer(order["run_file"], order["out"], **more, say=_say) as trainer:
            for batch in trainer.batches():
                trainer.forward_backward(batch)
                trainer.optimizer_step()
                if trainer.should_save:
                    trainer.save()
        return _DONE
    except IngotError as error:
        print(f"{error.code}: {error}", flush=True)
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return _FAILED


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()

"""`ingot.train` with callbacks in Python: in this process with one rank, imported by name with several."""

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
from tests.expect import refused
from tests.unit.api.conftest import numbers

import ingot
from ingot.plugins.callback import StepCallback, Verdict
from ingot.trainer.given import NOTHING_GIVEN, given_callbacks, imported_callbacks

torch = pytest.importorskip("torch")


class MeanLoss(StepCallback):
    """The mean loss of all steps, with its state in a tensor and in a record."""

    def __init__(self, run=None, options=None):
        self.sum, self.steps = torch.zeros((), dtype=torch.float64), 0

    def on_line(self, steps):
        self.sum += sum(one.loss for one in steps)
        self.steps += len(steps)
        return {"mean": float(self.sum) / self.steps, "steps": self.steps}

    def tensors(self):
        return {"sum": self.sum}

    def record(self):
        return self.steps

    def restore(self, record):
        self.steps = record


class StopsAtFour(StepCallback):
    def verdict(self, steps):
        return Verdict.STOP if steps[-1].step == 4 else Verdict.CONTINUE


def as_command(run_file, out, until_step=None):
    """Train as a rank of the command does. Returns (metrics, files of the newest checkpoint)."""
    result = ingot.train(run_file, out, until_step=until_step)
    return numbers(result.run)


def state_of_process():
    gc.collect()  # a model is in cycles of references
    return {
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), [thread.name for thread in threading.enumerate()]),
        "random": torch.get_rng_state().tolist(),
        "group": torch.distributed.is_initialized(),
        "files": sorted(path.name for path in Path("/proc/self/fd").iterdir()),
        "products": torch.get_float32_matmul_precision(),
    }


def test_a_run_in_this_process_has_the_bits_of_the_command(run_file, tmp_path, whole, forked):
    def train():
        ingot.train(run_file, tmp_path / "first", callbacks=[print_nothing])  # imports everything
        before, lines, seen = state_of_process(), [], []
        done = ingot.train(run_file, tmp_path / "here", callbacks=[seen.extend], say=lines.append)
        assert state_of_process() == before
        return done, lines, [one.step for one in seen]

    result, lines, seen = forked(train)
    assert result.finished and (result.step, result.saved_step, result.restarts) == (6, 6, 0)
    assert numbers(result.run) == whole[1]
    assert seen == [1, 2, 3, 4, 5, 6] and sum(line.startswith("step ") for line in lines) == 3
    assert ingot.Run(result.run).status().state == "finished"


def print_nothing(steps):
    pass


@pytest.mark.nightly  # test_trainer.py has it for a loop of a program
def test_the_command_continues_a_run_of_this_process_and_the_reverse(run_file, tmp_path, whole, forked):
    here, there = tmp_path / "here", tmp_path / "there"
    result = forked(lambda: ingot.train(run_file, here, callbacks=[print_nothing], until_step=3))
    assert not result.finished and (result.step, result.exit_code) == (3, 10)
    assert as_command(run_file, here) == whole[1]
    as_command(run_file, there, until_step=3)
    assert forked(lambda: ingot.resume(there, callbacks=[print_nothing])).finished
    assert numbers(there) == whole[1]


def test_a_callback_with_state_is_a_part_of_the_run(run_file, tmp_path, whole, forked):
    def train(*callbacks, **options):
        return forked(lambda: ingot.train(run_file, tmp_path / "run", callbacks=callbacks, **options))

    train(MeanLoss, until_step=3)
    with refused("E-RUN-CHANGED", keys=["callbacks"], step=3):
        ingot.train(run_file, tmp_path / "run")
    with refused("E-RUN-CHANGED", keys=["callbacks"]):
        ingot.resume(tmp_path / "run", callbacks=[print_nothing])
    assert train(MeanLoss()).finished  # the class or an instance
    assert numbers(tmp_path / "run")[0] == whole[1][0]
    values = {e["step"]: e["values"] for e in ingot.Run(tmp_path / "run").events("metrics")}
    mean = sum(whole[1][0]["loss"]) / 6
    assert values[6] == {"mean": pytest.approx(mean, rel=1e-12), "steps": 6}
    assert ingot.Run(tmp_path / "run").config.callbacks == {}


@pytest.mark.slow
def test_a_run_continues_without_its_callback_after_consent(run_file, tmp_path, whole, forked):
    run = tmp_path / "run"
    forked(lambda: ingot.train(run_file, run, callbacks=[MeanLoss, StopsAtFour]))
    assert ingot.Run(run).checkpoints()[-1].step == 4
    assert ingot.resume(run, accept=["callbacks"]).finished
    assert numbers(run)[0] == whole[1][0]
    ((change),) = ingot.Run(run).events("setting_changed")
    assert (change["key"], change["new"], set(change["old"])) == ("callbacks", {}, {"MeanLoss", "StopsAtFour"})


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_saves_and_stops(run_file, tmp_path, whole, forked, number):
    def train():
        before = signal.getsignal(signal.SIGINT)
        lines = []

        def interrupt(steps):
            if steps[-1].step == 2:
                os.kill(os.getpid(), number)
                if number == signal.SIGTERM:
                    os.kill(os.getpid(), number)  # a second one, which a scheduler sends

        result = ingot.train(run_file, tmp_path / "run", callbacks=[interrupt], say=lines.append)
        assert not (tmp_path / "run" / "stop-request").exists() and signal.getsignal(signal.SIGINT) is before
        return result, lines

    result, lines = forked(train)
    assert not result.finished and result.step == result.saved_step in (
        3,
        4,
    )  # requests are read at lines, or after 0.2 s
    assert sum(line.startswith("stopping") for line in lines) == 1
    assert forked(lambda: ingot.resume(tmp_path / "run", callbacks=[print_nothing])).finished
    assert numbers(tmp_path / "run") == whole[1]


def test_a_second_interrupt_and_an_error_leave_a_process_that_trains_again(run_file, tmp_path, whole, forked):
    def interrupt(steps):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    def fail(steps):
        raise ZeroDivisionError("a bug")

    def train():
        run = tmp_path / "run"
        with pytest.raises(KeyboardInterrupt):
            ingot.train(run_file, run, callbacks=[interrupt])
        with refused("E-CALLBACK", callback="fail"):
            ingot.train(run_file, run, callbacks=[fail])
        threads = [thread.name for thread in threading.enumerate()]
        assert "ingot-loader" not in threads and not torch.distributed.is_initialized()
        return ingot.train(run_file, run, callbacks=[print_nothing])

    assert forked(train).finished and numbers(tmp_path / "run") == whole[1]


def test_a_process_of_a_group_is_refused(run_file, tmp_path, fork_ranks):
    def train(rank, ranks):
        with refused("E-PROCESS-GROUP"):
            ingot.train(run_file, tmp_path / "run", callbacks=[print_nothing])
        return ingot.Run(tmp_path / "run").status().state

    assert fork_ranks(train, 1) == ["not started"]


@pytest.mark.parametrize("callbacks", [["x"], [dict], [MeanLoss, MeanLoss()]])
def test_what_is_no_callback_is_refused(run_file, tmp_path, callbacks):
    with refused("E-CALLBACKS-GIVEN"):
        ingot.train(run_file, tmp_path / "run", callbacks=callbacks)
    assert not (tmp_path / "run").exists()


def test_a_name_of_the_run_file_is_refused(run_file):
    config = ingot.Run(run_file.parent).config
    given = given_callbacks([MeanLoss])
    with refused("E-CALLBACKS-GIVEN", name="MeanLoss"):
        given.added_to(given.added_to(config))
    assert NOTHING_GIVEN.added_to(config) is config


def test_several_ranks_need_callbacks_that_they_can_import(run_file, tmp_path, monkeypatch):
    class Local(StepCallback):
        pass

    for callback in (print_nothing, lambda steps: None, MeanLoss(), Local):
        with refused("E-CALLBACKS-RANKS"):
            ingot.train(run_file, tmp_path / "run", overrides=["parallel.dp_shard=2"], callbacks=[callback])
    monkeypatch.setattr(MeanLoss, "__module__", "__main__")
    with refused("E-CALLBACKS-RANKS", name="MeanLoss"):
        ingot.train(run_file, tmp_path / "run", overrides=["parallel.dp_shard=2"], callbacks=[MeanLoss])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_several_ranks_import_a_class_by_name(run_file, tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    (folder / "lab").mkdir(parents=True)
    (folder / "lab" / "__init__.py").touch()
    (folder / "lab" / "counting.py").write_text(
        "from ingot.plugins.callback import StepCallback\n\n\nclass Counting(StepCallback):\n"
        "    def on_line(self, steps):\n        return {'steps': len(steps)}\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    from lab.counting import Counting  # pyright: ignore[reportMissingImports]

    given = given_callbacks([Counting])
    assert given.references() == [(str(folder), "lab.counting:Counting")]
    assert imported_callbacks(given.references()).callbacks == given.callbacks
    result = ingot.train(run_file, tmp_path / "run", overrides=["parallel.dp_shard=2"], callbacks=[Counting])
    assert result.finished
    values = [(e["step"], e["by"], e["values"]) for e in ingot.Run(result.run).events("metrics")]
    assert values == [(step, "Counting", {"steps": 2.0}) for step in (2, 4, 6)]

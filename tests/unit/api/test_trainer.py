"""ingot.Trainer: loops of research programs, with the bits and the guarantees of `ingot train`."""

import math
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.expect import refused
from tests.unit.api.conftest import numbers
from tests.unit.api.test_train_here import MeanLoss, state_of_process

import ingot
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import load_run
from ingot.trainer.resilience.lock import is_locked

torch = pytest.importorskip("torch")


def loop(run_file, out, *, by_hand=False, each=lambda trainer, batch: None, **options):
    """The loop of examples/own_loop.py. Returns the steps of its batches and lines."""
    steps, lines = [], []
    with ingot.Trainer(run_file, out, **options) as trainer:
        for batch in trainer.batches():
            steps.append(batch.step)
            if by_hand:
                documents = batch.document_ids if batch.document_ids is not None else [None] * len(batch.inputs)
                for inputs, targets, ids in zip(batch.inputs, batch.targets, documents, strict=True):
                    trainer.backward(trainer.model(inputs, targets, ids) / batch.inputs.numel())
            else:
                trainer.forward_backward(batch)
            trainer.optimizer_step()
            if trainer.should_log:
                lines.append([one.step for one in trainer.line])
            if trainer.should_save:
                trainer.save()
            each(trainer, batch)
    return steps, lines


@pytest.mark.parametrize("by_hand", [False, True])
def test_one_process_has_the_bits_of_the_command(run_file, tmp_path, whole, forked, by_hand):
    def train():
        loop(run_file, tmp_path / "first")  # imports everything
        before = state_of_process()
        found = loop(run_file, tmp_path / "run", by_hand=by_hand)
        assert state_of_process() == before and not is_locked(RunFolder(tmp_path / "run").lock)
        return found

    assert forked(train) == ([1, 2, 3, 4, 5, 6], [[1, 2], [3, 4], [5, 6]])
    assert numbers(tmp_path / "run") == whole[1]
    assert ingot.Run(tmp_path / "run").status().state == "finished"


def test_the_command_continues_a_loop_and_the_reverse(run_file, tmp_path, whole, forked):
    here, there = tmp_path / "here", tmp_path / "there"
    assert forked(lambda: loop(run_file, here, until_step=3))[0] == [1, 2, 3]
    assert ingot.Run(here).status().state == "stopped"
    assert ingot.train(run_file, here).finished and numbers(here) == whole[1]
    ingot.train(run_file, there, until_step=3)
    assert forked(lambda: loop(there, None))[0] == [4, 5, 6] and numbers(there) == whole[1]
    assert forked(lambda: loop(there, None)) == ([], [])  # finished: nothing is built
    assert [e["from_step"] for e in ingot.Run(there).events("run_started")] == [0, 3]
    assert len(list(ingot.Run(there).events("finished"))) == 1


def test_two_ranks_have_the_bits_of_the_command(run_file, tmp_path, whole, monkeypatch, two_processes):
    run_file.write_text(run_file.read_text().replace("dp_shard = 1", "dp_shard = 2"))
    results = two_processes(lambda: loop(run_file, tmp_path / "run", callbacks=[print_nothing]))
    assert results == [([1, 2, 3, 4, 5, 6], [[1, 2], [3, 4], [5, 6]])] * 2
    assert numbers(tmp_path / "run") == whole[2]


def print_nothing(steps):
    pass


def test_an_error_of_rank_0_before_training_is_that_of_all(run_file, tmp_path, two_processes):
    run_file.write_text(run_file.read_text().replace("dp_shard = 1", "dp_shard = 2"))
    two_processes(lambda: loop(run_file, tmp_path / "run", until_step=2))

    def refuse():
        with refused("E-RUN-CHANGED", keys=["optim.lr"]):
            loop(run_file, tmp_path / "run", overrides=["optim.lr=1e-3"])
        return True

    assert two_processes(refuse) == [True, True]


@pytest.fixture
def two_processes(forked):
    """`two_processes(function)` calls a function on two ranks whose environment is that of torchrun."""
    import socket
    from concurrent.futures import ThreadPoolExecutor

    def call(function):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]

        def rank(number):
            def run():
                place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
                job = place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in job.items()})
                return function()

            return forked(run)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(rank, range(2)))

    return call


def test_leaving_the_loop_saves_and_an_error_does_not(run_file, tmp_path, whole, forked):
    class Enough(Exception):
        pass

    def leave():
        with ingot.Trainer(run_file, tmp_path / "run", overrides=["watch.log_every=10"]) as trainer:
            for batch in trainer.batches():
                trainer.forward_backward(batch)
                if batch.step == 3:  # a step that is not complete is not a part of the run
                    break
                trainer.optimizer_step()
                assert trainer.step == batch.step

    def fail(trainer, batch):
        raise Enough

    def interrupted():
        with pytest.raises(Enough):
            loop(run_file, tmp_path / "run", each=fail)

    forked(leave)
    assert ingot.Run(tmp_path / "run").checkpoints()[-1].step == 2
    assert [e["step"] for e in ingot.Run(tmp_path / "run").events("stopped")] == [2]
    assert [e["step"] for e in ingot.Run(tmp_path / "run").events("step")] == [1, 2]
    forked(interrupted)
    assert ingot.Run(tmp_path / "run").checkpoints()[-1].step == 2
    forked(lambda: loop(run_file, tmp_path / "run"))
    assert numbers(tmp_path / "run")[0] == whole[1][0]


def test_a_stop_request_ends_the_loop_after_a_saved_step(run_file, tmp_path, forked):
    def interrupt(trainer, batch):
        if batch.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    assert forked(lambda: loop(run_file, tmp_path / "run", each=interrupt))[0] == [1, 2]
    status = ingot.Run(tmp_path / "run").status()
    assert (status.state, status.checkpoint_step) == ("stopped", 2)


def forget(run_file, out, part, code="E-LOOP-ORDER", **options):
    """A loop whose steps are `part(trainer, batch)`, which has to be refused."""
    with refused(code), ingot.Trainer(run_file, out, **options) as trainer:
        for batch in trainer.batches():
            part(trainer, batch)
    return True


PARTS = {
    "nothing": lambda trainer, batch: None,
    "no update": lambda trainer, batch: trainer.forward_backward(batch),
    "no gradients": lambda trainer, batch: trainer.optimizer_step(),
    "twice": lambda trainer, batch: [trainer.forward_backward(batch) for _ in range(2)],
    "too few backwards": lambda trainer, batch: [one_backward(trainer, batch), trainer.optimizer_step()],
    "too many backwards": lambda trainer, batch: [one_backward(trainer, batch) for _ in range(5)],
    "both ways": lambda trainer, batch: [one_backward(trainer, batch), trainer.forward_backward(batch)],
    "two updates": lambda trainer, batch: [whole_step(trainer, batch), trainer.optimizer_step()],
    "no save": lambda trainer, batch: whole_step(trainer, batch),
    "save too early": lambda trainer, batch: [whole_step(trainer, batch), trainer.save()],
}


def whole_step(trainer, batch):
    trainer.forward_backward(batch)
    trainer.optimizer_step()


def one_backward(trainer, batch):
    trainer.backward(trainer.model(batch.inputs[0], batch.targets[0]) / batch.inputs.numel())


@pytest.mark.parametrize("name", PARTS)
def test_a_step_that_is_not_complete_is_refused(run_file, tmp_path, forked, name):
    assert forked(forget, run_file, tmp_path / "run", PARTS[name])


CALLS = {
    "forward_backward": lambda trainer, batch: trainer.forward_backward(batch),
    "backward": lambda trainer, batch: [one_backward(trainer, batch) for _ in batch.inputs],
    "optimizer_step": lambda trainer, batch: [trainer.forward_backward(batch), trainer.optimizer_step()],
}


def fail_at(owner, name, number):
    """Make call `number` of a method of `owner` run out of memory."""
    method, calls = getattr(owner, name), []

    def fail_once(*arguments, **options):
        calls.append(name)
        if len(calls) == number:
            raise torch.OutOfMemoryError
        return method(*arguments, **options)

    setattr(owner, name, fail_once)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_raised_halfway_cannot_be_repeated(run_file, tmp_path, forked, call):
    """The second micro-batch of step 3 runs out of memory (or the update), and the loop catches the error."""
    again = [CALLS[call], CALLS["forward_backward"], CALLS["optimizer_step"], lambda trainer, batch: trainer.save()]
    name = "step" if call == "optimizer_step" else "after_backward"

    def train():
        refusals = []
        with ingot.Trainer(run_file, tmp_path / "run") as trainer:
            for batch in trainer.batches():
                if batch.step < 3:
                    whole_step(trainer, batch)
                    continue
                owner = trainer.parts.optimizer if call == "optimizer_step" else trainer.parts.model.data
                fail_at(owner, name, 1 if call == "optimizer_step" else 2)
                with pytest.raises(torch.OutOfMemoryError):
                    CALLS[call](trainer, batch)
                for part in again:
                    with refused("E-LOOP-ORDER", step=3) as error:
                        part(trainer, batch)
                    refusals.append(f"{call}()" in error.value.found and "newest checkpoint" in error.value.fix)
                break
        return refusals

    assert forked(train) == [True] * 4
    assert not ingot.Run(tmp_path / "run").checkpoints(), "a broken step ends a run as an error does"


def test_the_policy_ends_a_loop_and_saves_nothing(run_file, tmp_path, forked):
    def broken(trainer, batch):
        trainer.parts.model.shards[0].value.fill_(math.nan)
        trainer.parts.model.publish()
        trainer.forward_backward(batch)
        trainer.optimizer_step()

    watching = {"overrides": ['guard.preset="watch"']}
    assert forked(lambda: forget(run_file, tmp_path / "run", broken, "E-LOSS-NOT-FINITE", **watching))
    assert not ingot.Run(tmp_path / "run").checkpoints()


def test_a_learning_rate_of_ones_own_is_used_and_logged(run_file, tmp_path, forked):
    def train():
        with ingot.Trainer(run_file, tmp_path / "run", until_step=2) as trainer:
            assert trainer.learning_rate(2) == 0.005 and trainer.config == load_run(trainer.run / "run.toml")
            for batch in trainer.batches():
                trainer.forward_backward(batch)
                trainer.optimizer_step(lr=1e-4 * batch.step)
                if trainer.should_log:
                    for _ in range(2):  # a judged step may be saved, and twice is once
                        trainer.save()

    forked(train)
    assert ingot.Run(tmp_path / "run").metrics()["lr"] == [1e-4, 2e-4]


def test_a_callback_with_state_is_a_part_of_a_loops_run(run_file, tmp_path, forked):
    forked(lambda: loop(run_file, tmp_path / "run", callbacks=[MeanLoss], until_step=3))
    with refused("E-RUN-CHANGED", keys=["callbacks"]):
        ingot.train(run_file, tmp_path / "run")
    forked(lambda: loop(run_file, tmp_path / "run", callbacks=[MeanLoss]))
    assert list(ingot.Run(tmp_path / "run").events("metrics"))[-1]["values"]["steps"] == 6


@pytest.mark.parametrize(
    ("overrides", "code"),
    [(["parallel.dp_shard=2"], "E-LOOP-RANKS"), (["optim.lr=-1"], "E-CONFIG-SETTINGS")],
)
def test_a_run_that_cannot_open_is_refused(run_file, tmp_path, forked, overrides, code):
    def refuse():
        with refused(code), ingot.Trainer(run_file, tmp_path / "run", overrides=overrides):
            pass
        return torch.distributed.is_initialized()

    assert forked(refuse) is False and not (tmp_path / "run" / "events.jsonl").exists()


def test_a_trainer_is_open_within_its_block(run_file, tmp_path, forked):
    trainer = ingot.Trainer(run_file, tmp_path / "run")
    for use in (lambda: next(trainer.batches()), lambda: trainer.parts, trainer.save, trainer.optimizer_step):
        with refused("E-LOOP-CLOSED"):
            use()

    def finished():
        loop(run_file, tmp_path / "run")
        with ingot.Trainer(run_file, tmp_path / "run") as trainer, refused("E-LOOP-FINISHED"):
            assert not trainer.should_save and not trainer.should_log
            _ = trainer.model
        return True

    assert forked(finished)


def test_a_layout_without_a_whole_model_has_none(golden, tmp_path, forked):
    text = (golden / "experts-1-rank" / "run.toml").read_text().replace("../data", str(golden / "data"))
    (tmp_path / "run.toml").write_text(text)

    def train():
        with ingot.Trainer(tmp_path / "run.toml", tmp_path / "run") as trainer:
            for batch in trainer.batches():
                with refused("E-LOOP-LAYOUT") if batch.step == 1 else nullcontext():
                    _ = trainer.model if batch.step == 1 else None
                trainer.forward_backward(batch)
                trainer.optimizer_step()
                if trainer.should_save:
                    trainer.save()
        return trainer.config.train.steps

    steps = forked(train)
    assert ingot.Run(tmp_path / "run").metrics()["step"] == list(range(1, steps + 1))


def test_the_refusal_of_the_model_names_every_reason(run_file, tmp_path, monkeypatch):
    trainer = ingot.Trainer(run_file, tmp_path / "run")
    parallel = replace(trainer.config.parallel, pp=2)
    monkeypatch.setattr(trainer, "config", replace(trainer.config, loss={"z": {"weight": 0.1}}))
    parts = SimpleNamespace(mesh=SimpleNamespace(parallel=parallel))
    monkeypatch.setattr(ingot.Trainer, "parts", property(lambda self: parts))
    reasons = ["pipeline stages (parallel.pp)", "loss terms ([loss]: z)"]
    with refused("E-LOOP-LAYOUT", parts=reasons) as error:
        _ = trainer.model
    assert all(reason in error.value.found for reason in reasons) and "experts" not in error.value.found


def test_a_loop_by_hand_masks_documents(run_file, tmp_path, forked):
    masked = {"overrides": ["data.mask_documents=true"]}
    forked(lambda: loop(run_file, tmp_path / "whole", **masked))
    forked(lambda: loop(run_file, tmp_path / "by-hand", by_hand=True, **masked))
    forked(lambda: loop(run_file, tmp_path / "open"))
    assert numbers(tmp_path / "by-hand") == numbers(tmp_path / "whole") != numbers(tmp_path / "open")


def test_targets_that_are_masked_leave_inputs_alone(run_file, tmp_path, forked):
    def masked():
        with ingot.Trainer(run_file, tmp_path / "run") as trainer:
            batch = next(trainer.batches())
            before = batch.inputs.clone()
            batch.targets[batch.targets > 0] = -100
            return torch.equal(batch.inputs, before)

    assert forked(masked)

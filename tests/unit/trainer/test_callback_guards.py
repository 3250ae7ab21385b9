"""The guards of callbacks: an error of a callback, and every break of its contract, ends the run with its name."""

from types import SimpleNamespace

import pytest
import torch
from tests.expect import calls_of, refused

from ingot.errors import IngotError
from ingot.plugins.callback import StepCallback, StepNumbers, Verdict
from ingot.plugins.piece import ParameterShard
from ingot.trainer.callbacks import MOST_RECORD_BYTES, Callbacks

CPU = torch.device("cpu")
LINE = [StepNumbers(step=3, loss=1.0, grad_norm=1.0, skipped=False)]


def piece_of(name="w", rows=4):
    return ParameterShard(name, (4, 3), (0, 0), (rows, 3), torch.zeros(rows, 3), True, torch.ones(rows, 3))


def callbacks_of(pieces=()) -> Callbacks:
    return Callbacks(SimpleNamespace(callbacks={"probe": {}}), list(pieces), CPU)


def broken(method: str, **facts):
    return refused("E-CALLBACK", callback="probe", method=method, **facts)


def raising(method: str):
    def fail(self, *args):
        raise KeyError(method)

    return type("Raising", (StepCallback,), {method: fail}), fail.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("__init__", lambda c: None),
        ("tensors", lambda c: None),
        ("on_gradients", lambda c: c.gradients(1)),
        ("on_update", lambda c: c.updated(1)),
        ("on_line", lambda c: c.line(LINE, print)),
        ("verdict", lambda c: c.line(LINE, print)),
        ("record", lambda c: c.records()),
        ("restore", lambda c: c.restore({"probe": 1})),
    ],
)
def test_an_error_names_the_callback_its_method_and_the_line(register, method, call):
    make, line = raising(method)
    register(make)
    shown = "start" if method == "__init__" else method
    with broken(shown, file=__file__, line=line) as caught:
        call(callbacks_of())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "message", ["[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"]
)
def test_a_lost_rank_is_not_blamed_on_the_callback_that_waited_for_it(register, message):
    """The error of a callback ends the run for good; a lost rank costs a restart."""

    def wait(self, step):
        raise RuntimeError(message)

    register(type("Waiting", (StepCallback,), {"on_gradients": wait}))
    with pytest.raises(RuntimeError) as caught:
        callbacks_of().gradients(1)
    assert str(caught.value) == message and not isinstance(caught.value, IngotError)


def test_a_callback_is_a_step_callback(register):
    register(lambda run, options: object())
    with broken("start"):
        callbacks_of()


def with_tensors(state):
    return type("Stateful", (StepCallback,), {"tensors": lambda self: state})


GOOD = torch.zeros(4, 3)


@pytest.mark.parametrize(
    "state",
    [
        {"own": {}},
        {"own": {"w": torch.zeros(3, 4)}},
        {"own": {"w": GOOD, "empty": torch.zeros(0, 3)}},
        {"own": {"w": GOOD, "v": GOOD}},
        {"own": {"v": GOOD}},
        {"own": {"w": 1.0}},
        {"own": 1.0},
        {"own": None},
        None,
        {},
        {"one": {"w": GOOD}, "two": {"w": GOOD}},
    ],
)
def test_tensors_of_another_shape_than_the_pieces_are_refused(register, state):
    register(with_tensors(state), pieces=1)
    with broken("tensors"):
        callbacks_of([piece_of(), piece_of("empty", 0)])


def test_tensors_of_the_shape_of_the_pieces_and_others_are_kept(register):
    state = {"own": {"w": GOOD}, "count": torch.zeros(())}
    register(with_tensors(state), pieces=1)
    assert callbacks_of([piece_of(), piece_of("empty", 0)]).tensors() == {
        "probe.own": state["own"],
        "probe.count": state["count"],
    }


@pytest.mark.parametrize("hold", [lambda grad: grad, lambda grad: [grad.view(-1)], lambda grad: None])
def test_gradients_that_are_kept_beyond_the_first_step_are_noticed(register, hold):
    class Keeping(StepCallback):
        def __init__(self, run, options):
            self.pieces, self.kept = run.pieces, []

        def on_gradients(self, step):
            self.kept.append(hold(self.pieces[0].grad))

    register(Keeping)
    callbacks = callbacks_of([piece := piece_of(), piece_of("empty", 0)])
    callbacks.gradients(1)
    piece.grad = callbacks.pieces[1].grad = None
    if hold(GOOD) is None:
        callbacks.updated(1)
    else:
        with broken("on_gradients"):
            callbacks.updated(1)


@pytest.mark.parametrize("verdict", [Verdict.SKIP, None, "STOP", True])
def test_other_verdicts_are_refused(register, verdict):
    register(type("Odd", (StepCallback,), {"verdict": lambda self, steps: verdict}))
    with broken("verdict"):
        callbacks_of().line(LINE, print)


@pytest.mark.parametrize("metrics", [None, [1.0], {"a": "many"}, {"a": torch.zeros(2)}])
def test_metrics_are_numbers_by_name(register, metrics):
    register(type("Odd", (StepCallback,), {"on_line": lambda self, steps: metrics}))
    with broken("on_line"):
        callbacks_of().line(LINE, print)


@pytest.mark.parametrize("record", ["x" * MOST_RECORD_BYTES, {1, 2}, torch.zeros(1), float("nan"), {(1, 2): 3}])
def test_a_record_is_a_little_json(register, record):
    register(type("Odd", (StepCallback,), {"record": lambda self: record}))
    with broken("record"):
        callbacks_of().records()


def test_a_run_without_callbacks_does_nothing_for_them():
    callbacks = Callbacks(SimpleNamespace(callbacks={}), [piece_of()], CPU)
    assert calls_of(lambda: (callbacks.gradients(1), callbacks.updated(1))) <= 4
    assert callbacks.line(LINE, lambda *_, **__: 1 / 0) is Verdict.CONTINUE
    assert callbacks.tensors() == callbacks.records() == {}
    assert callbacks._lent == []

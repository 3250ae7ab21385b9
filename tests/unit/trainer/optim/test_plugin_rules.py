"""Rules of plug-ins that break their contract: the run ends with a name, a file and a line."""

from pathlib import Path

import pytest
from tests.dist.steps import CPU, batch_of, run_of
from tests.expect import refused

from ingot.errors import IngotError
from ingot.plugins.optimizer import OPTIMIZERS, MatrixRule, OptimizerPart, UpdateRule
from ingot.plugins.registry import MAIN
from ingot.schema.run import Optim
from ingot.trainer.build import build_parts
from ingot.trainer.step import train_step

ODD = Optim(kind="odd", lr=1e-2)


@pytest.fixture
def register():
    """`register(rule_of, ...)` registers the optimizer "odd"; rule_of: parameter name, shape -> rule."""

    def add(rule_of, moments=lambda name, dims: 1, **more):
        OPTIMIZERS.register(OptimizerPart(name="odd", make=lambda optim, options: rule_of, moments=moments, **more))

    yield add
    OPTIMIZERS.forget(MAIN)


class Plain(UpdateRule):
    state = ("momentum",)

    def new(self, value, gradient, state, lr, *, decays):
        return value - lr * gradient, state


class Whole(MatrixRule):
    state = ("momentum",)

    def direction(self, gradient, state):
        return gradient, state

    def of_matrix(self, direction):
        return direction

    def apply(self, value, update, lr, *, decays):
        return value - lr * update


def built(rank, world):
    return build_parts(run_of(optim=ODD), CPU, Path())


def step(rank, world):
    parts = built(rank, world)
    train_step(parts, batch_of(parts.config, parts.mesh, 1), 1e-2)


def ends(fork_ranks, call, code, **facts):
    def fail(rank, world):
        with refused(code, **facts):
            call(rank, world)
        return True

    assert fork_ranks(fail, 1) == [True]


@pytest.mark.parametrize(
    ("rule", "moments", "whole"),
    [
        (object(), 1, False),
        (None, 1, False),
        (Plain(), 2, False),
        (Whole(), 1, False),  # not declared
        (Whole(), 1, True),  # for vectors, too
    ],
)
def test_rules_are_what_their_optimizer_declares(fork_ranks, register, rule, moments, whole):
    register(lambda name, shape: rule, lambda name, dims: moments, whole_matrices=whole)
    ends(fork_ranks, built, "E-OPTIMIZER-RULE", optimizer="odd")


def matrices_of(rule):
    return lambda name, shape: rule if len(shape) == 2 else Plain()


def test_declared_rules_train(fork_ranks, register):
    register(matrices_of(Whole()), whole_matrices=True)
    fork_ranks(step, 1)


def test_an_update_has_the_shape_of_its_matrix(fork_ranks, register):
    class Odd(Whole):
        def of_matrix(self, direction):
            return direction[:1]

    register(matrices_of(Odd()), whole_matrices=True)
    ends(fork_ranks, step, "E-OPTIMIZER-UPDATE")


@pytest.mark.parametrize("wrong", ["value", "state", "missing", "misspelled", "direction"])
def test_what_a_rule_returns_is_like_what_it_was_given(fork_ranks, register, wrong):
    class Odd(Plain):
        def new(self, value, gradient, state, lr, *, decays):
            momentum = state["momentum"]
            results = {
                "value": (value.sum(), state),
                "state": (value, {"momentum": momentum.sum()}),
                "missing": (value, {}),
                "misspelled": (value, {"momentun": momentum}),
            }
            return results[wrong]

    class OddDirection(Whole):
        def direction(self, gradient, state):
            return gradient.sum(), state

    rule_of = matrices_of(OddDirection()) if wrong == "direction" else lambda name, shape: Odd()
    register(rule_of, whole_matrices=wrong == "direction")
    ends(fork_ranks, step, "E-OPTIMIZER-UPDATE")


def raising(base, method):
    def fail(self, *args, **more):
        raise KeyError(method)

    return type("Raising", (base,), {method: fail})(), fail.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("base", "method"), [(Plain, "new"), (Whole, "direction"), (Whole, "of_matrix"), (Whole, "apply")]
)
def test_an_error_of_a_rule_names_file_and_line(fork_ranks, register, base, method):
    rule, line = raising(base, method)
    register(matrices_of(rule), whole_matrices=base is Whole)
    ends(fork_ranks, step, "E-OPTIMIZER-RAISED", optimizer="odd", file=__file__, line=line)


def test_a_lost_rank_is_not_blamed_on_the_rule_that_waited_for_it(fork_ranks, register):
    class Waiting(Plain):
        def new(self, value, gradient, state, lr, *, decays):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242")

    register(lambda name, shape: Waiting())

    def fail(rank, world):
        with pytest.raises(RuntimeError) as caught:
            step(rank, world)
        return isinstance(caught.value, IngotError)

    assert fork_ranks(fail, 1) == [False]

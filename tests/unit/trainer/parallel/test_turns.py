"""Two computations take turns at the places where they would wait, and nowhere else."""

from contextlib import contextmanager
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from ingot.theory.schedule import turns as order_of_parts  # noqa: E402
from ingot.trainer.parallel.turns import Turns, pass_turn  # noqa: E402

CPU = torch.device("cpu")


def parts(note, side, exchanges):
    for part in range(exchanges):
        note((side, part))
        pass_turn()
    note((side, exchanges))


@pytest.mark.parametrize(("forward", "backward"), [(4, 4), (0, 3), (3, 0), (2, 6), (6, 2)])
def test_parts_run_in_the_order_of_the_simulation(forward, backward):
    seen, turns = [], Turns(CPU)
    for _ in range(2):  # the second pair uses the same thread
        seen.clear()
        turns.run(partial(parts, seen.append, 0, forward), partial(parts, seen.append, 1, backward))
        assert seen == list(order_of_parts(forward, backward))
    pass_turn()  # no pair: nothing to wait for


class Open:
    """An object that is open for one computation at a time."""

    def __init__(self):
        self.owner = None

    def put_aside(self):
        held, self.owner = self.owner, None
        return partial(setattr, self, "owner", held)


def test_each_has_its_own_state_and_its_own_context():
    turns, held, active = Turns(CPU), Open(), []
    turns.holders.append(held)

    @contextmanager
    def within(side):
        active.append(side)
        yield
        assert active.pop() == side

    def work(side):
        assert held.owner is None
        held.owner = side
        for _ in range(3):
            pass_turn()
            assert held.owner == side and active == [side]
        held.owner = None

    turns.run(partial(work, 0), partial(work, 1), (partial(within, 0), partial(within, 1)))
    assert held.owner is None and not active


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at", [0, 2])
def test_a_failure_ends_both(failing, at):
    turns, ended = Turns(CPU), []

    def work(side):
        for part in range(4):
            if (side, part) == (failing, at):
                raise ValueError(f"part {part} of {side}")
            pass_turn()
        ended.append(side)

    with pytest.raises(ValueError, match=f"part {at} of {failing}"):
        turns.run(partial(work, 0), partial(work, 1))
    assert not ended
    turns.run(list, list)  # the next pair runs


class _Repeated(torch.autograd.Function):
    """Arrives in its backward, as the repeated forward of a recomputed block does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        pass_turn(in_forward=True)
        return grads[0]


@pytest.mark.parametrize("sends_again", [True, False])
def test_a_repeated_forward_without_exchanges_keeps_the_turn(sends_again):
    turns, seen = Turns(CPU, sends_again=sends_again), []

    def backward():
        x = torch.ones(1, requires_grad=True)
        y = _Repeated.apply(x)
        pass_turn(in_forward=True)
        seen.append("forward")
        y.backward(torch.ones(1))
        seen.append("backward")

    turns.run(partial(parts, seen.append, 0, 2), backward)
    expected = [(0, 0), (0, 1), "forward", (0, 2), "backward"]
    assert seen == (expected if sends_again else [(0, 0), (0, 1), "forward", "backward", (0, 2)])

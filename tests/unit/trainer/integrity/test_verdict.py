"""The damaged rank, and whether it is damaged again: decided from what ranks found."""

from ingot.trainer.integrity.verdict import (
    NOTHING,
    Damage,
    OwnGradients,
    ReplayVerdict,
    Suspicion,
    Trust,
    doubted,
    ended,
    explained,
    firsts,
    judge,
    repeated,
)

PAIR = Damage(7, Trust.UNDECIDED, (0, 1))
NAMED = Damage(7, Trust.OWN_HASH, (1,))


def test_only_the_surest_signs_count_and_the_first_step():
    rows = [(Trust.UNDECIDED, 6), (Trust.OWN_HASH, 7), (Trust.NOTHING, 0), (Trust.MINORITY, 8)]
    assert judge(rows) == Damage(6, Trust.OWN_HASH, (1,))
    assert judge([(Trust.UNDECIDED, 7), (Trust.UNDECIDED, 7)]) == PAIR
    assert judge([(Trust.MINORITY, 7), (Trust.MINORITY, 7), (Trust.NOTHING, 0)]).ranks == (0, 1)


def test_of_the_signs_of_a_rank_the_surest_and_then_the_first_counts():
    late, early = Suspicion(trust=Trust.MINORITY, step=9), Suspicion(trust=Trust.MINORITY, step=8)
    assert NOTHING.or_worse(late).or_worse(early).or_worse(NOTHING) == early
    assert early.or_worse(Suspicion(trust=Trust.OWN_HASH, step=9)).step == 9


def test_the_replay_names_the_one_of_two_copies_that_changed():
    assert ended(PAIR, [True, False]) == ReplayVerdict("transient", (0,), True)
    assert ended(PAIR, [True, True]) == ReplayVerdict("transient", (0, 1), False)  # the gradients of both were spoiled
    assert ended(NAMED, [True, True]) == ReplayVerdict("transient", (1,), True)


def test_of_two_copies_that_both_changed_the_one_whose_gradients_changed_first_is_named():
    both = [True, True]
    assert ended(PAIR, both, [4, 5]) == ReplayVerdict("transient", (0,), True)
    assert ended(PAIR, both, [0, 6]) == ReplayVerdict("transient", (1,), True)
    assert ended(PAIR, both, [5, 5]) == ended(PAIR, both, [0, 0]) == ReplayVerdict("transient", (0, 1), False)
    assert ended(NAMED, both, [4, 0]) == ReplayVerdict("transient", (1,), True)  # its own hash is surer
    again = Damage(6, Trust.UNDECIDED, (0, 1))
    assert repeated(PAIR, again, both, [4, 5]) == ReplayVerdict("persistent", (0,), True)


def test_gradients_that_change_without_damage_name_nobody():
    assert firsts(own((4, 3, 2), (5, 3, 3)), (0, 1)) == [4, 5] and firsts(own((0, 3, 9), (5, 3, 4)), (0, 1)) == [0, 5]
    assert firsts(own((4, 3, 2), (3, 3, 2)), (0, 1)) == [0, 0]  # the copies were equal after step 3


def test_gradients_of_a_run_that_never_had_the_same_bits_twice_name_nobody():
    """Damage was found by the first comparison after a checkpoint of step 30, so no sound step is trained again."""
    assert firsts(own((31, 30, 0), (0, 30, 10)), (0, 1)) == [0, 0]
    assert firsts(own((33, 30, 2), (34, 30, 3)), (0, 1)) == [33, 34]  # 31 and 32 had the same bits on both
    assert firsts(own((33, 30, 2), (0, 0, 0), (34, 30, 3)), (0, 2)) == [33, 0, 34]  # rank 1 is no suspect


def own(*rows):
    return [OwnGradients(*row) for row in rows]


def test_damage_is_persistent_if_the_same_rank_is_damaged_again():
    assert repeated(NAMED, NAMED, [False, False]) == ReplayVerdict("persistent", (1,), True)
    assert repeated(PAIR, Damage(6, Trust.OWN_HASH, (1,)), [False, False]) == ReplayVerdict("persistent", (1,), True)
    assert repeated(NAMED, Damage(6, Trust.OWN_HASH, (0,)), [False, False]) == ReplayVerdict("other", (0,), True)
    # Twice at the same step, and each time other bits of one rank: a sound one has the same.
    assert repeated(PAIR, PAIR, [True, False]) == ReplayVerdict("persistent", (0,), True)
    assert repeated(PAIR, PAIR, [False, False]) == ReplayVerdict("persistent", (0, 1), False)
    assert repeated(PAIR, Damage(6, Trust.UNDECIDED, (0, 1)), [True, False]) == ReplayVerdict(
        "persistent", (0, 1), False
    )


def test_of_four_ranks_those_two_that_changed_are_named():
    """A wrong activation of a rank reaches the other ranks of its copy of the model."""
    four = Damage(7, Trust.RECOMPUTED, (0, 1, 2, 3))
    assert ended(four, [False, False, True, True]) == ReplayVerdict("transient", (2, 3), True)
    assert ended(four, [True] * 4) == ReplayVerdict("transient", (0, 1, 2, 3), False)
    assert repeated(four, four, [False, True, False, False]) == ReplayVerdict("persistent", (1,), True)


def test_of_ranks_that_computed_the_same_the_minority_is_doubted():
    assert doubted({0: 5, 1: 5}) == doubted({0: 5, 1: 5, 2: 5}) == frozenset()
    assert doubted({0: 5, 1: 6}) == {0, 1}
    assert doubted({0: 5, 1: 6, 2: 5}) == {1}
    assert doubted({0: 5, 1: 6, 2: 7}) == {0, 1, 2}


def test_one_rank_that_explains_all_differences_is_damaged():
    pair, other, alone = frozenset({0, 1}), frozenset({1, 2}), frozenset({2})
    assert explained([pair]) == explained([pair, pair]) == (pair, False)
    assert explained([pair, other]) == ({1}, True)
    assert explained([pair, frozenset({2, 3})]) == ({0, 1, 2, 3}, False)
    assert explained([pair, alone]) == ({2}, True)
    assert not Damage(7, Trust.RECOMPUTED, (0, 1)).is_named and Damage(7, Trust.RECOMPUTED_ALONE, (0,)).is_named
    assert not Damage(7, Trust.UNDECIDED, (0, 1)).of_gradients

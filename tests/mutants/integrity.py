"""Faults in the hashes of the state: of what they cover, whom they name, and what is saved without them."""

from .mutant import Mutant

_HASHING = "tests/unit/trainer/integrity/test_hashing.py"
_VERDICT = "tests/unit/trainer/integrity/test_verdict.py"
_DAMAGE = "tests/unit/trainer/integrity/test_damage.py"
_LAYOUTS = "tests/dist/test_state_hashes.py"
_EVERY_BIT = f"{_DAMAGE}::test_every_bit_names_its_rank_at_once_and_the_run_keeps_its_bits"
_COPIES = f"{_DAMAGE}::test_of_two_copies_the_one_that_the_replay_changes_is_named"
_SAVED = f"{_DAMAGE}::test_nothing_damaged_is_saved"

MUTANTS: list[Mutant] = [
    Mutant(
        name="multipliers-even",
        what="a flip of the highest bit can leave the hash as it was",
        file="trainer/integrity/hashing.py",
        before=" | np.uint64(1)).view",
        after=" & ~np.uint64(1)).view",
        tests=(_HASHING,),
    ),
    Mutant(
        name="rest-of-a-tensor-not-hashed",
        what="the elements after the last whole row are not hashed",
        file="trainer/integrity/hashing.py",
        before="if rest := words.numel() - whole * _ROW:",
        after="if rest := 0:",
        tests=(_HASHING,),
    ),
    Mutant(
        name="moments-not-hashed",
        what="the state of the optimizer is not hashed",
        file="trainer/integrity/watch.py",
        before="first_rank=False) if moments else alone.weights()",
        after="first_rank=False) if False else alone.weights()",
        tests=(f"{_EVERY_BIT}[shards alone]",),
    ),
    Mutant(
        name="copies-not-compared",
        what="the hashes of copies are not compared",
        file="trainer/integrity/watch.py",
        before="flags.append((rows != rows[0]).any())",
        after="flags.append((rows != rows).any())",
        tests=(_COPIES,),
    ),
    Mutant(
        name="copies-of-masters-not-compared",
        what="the parameters that the forward reads are not compared",
        file="trainer/integrity/watch.py",
        before="if self._copies.groups:",
        after="if False:",
        tests=(f"{_LAYOUTS}::test_nothing_differs_without_a_fault_and_copies_are_known[zero 2]",),
    ),
    Mutant(
        name="damage-of-others-ignored",
        what="a rank does not hear of the damage of another",
        file="trainer/log.py",
        before="return bool(rows[:, -1].any())",
        after="return damaged",
        tests=(f"{_EVERY_BIT}[shards alone]",),
    ),
    Mutant(
        name="save-without-comparison",
        what="a step is saved whose state was not compared with its hash",
        file="trainer/integrity/watch.py",
        before='self._add(step, "before_save", self._masters, self._to_save[1], earlier)',
        after="pass",
        tests=(f"{_SAVED}[sync]",),
    ),
    Mutant(
        name="copy-not-compared",
        what="a checkpoint has what changed after the comparison and before its copy",
        file="trainer/checkpoint/save.py",
        before="        if require_unchanged is not None:\n            require_unchanged()\n",
        after="",
        tests=(f"{_SAVED}[sync]",),
    ),
    Mutant(
        name="copy-in-the-background-not-compared",
        what="a snapshot has what changed after the comparison and before its copy",
        file="trainer/checkpoint/background.py",
        before="            if require_unchanged is not None:\n                require_unchanged()\n",
        after="",
        tests=(f"{_SAVED}[async]",),
    ),
    Mutant(
        name="replay-not-hashed",
        what="of two copies nobody is named, because the steps that are trained again are not hashed",
        file="trainer/integrity/watch.py",
        before=" or (self.replayed is not None and step <= self.replayed.step)",
        after="",
        tests=(
            f"{_DAMAGE}::test_between_two_hashes_copies_find_damage_and_all_steps_that_are_trained_again_are_hashed",
        ),
    ),
    Mutant(
        name="damaged-forever-again",
        what="a rank that is damaged again in the same steps goes on",
        file="trainer/damage.py",
        before='if replayed.verdict == "persistent":',
        after="if False:",
        tests=(f"{_DAMAGE}::test_damage_that_comes_again_ends_the_run",),
    ),
    Mutant(
        name="majority-is-damaged",
        what="of three copies, the two that are equal count as damaged",
        file="trainer/integrity/watch.py",
        before="if is_majority and hashes[place] == most:",
        after="if is_majority and hashes[place] != most:",
        tests=(f"{_DAMAGE}::test_of_three_copies_the_one_that_differs_is_named_at_once",),
    ),
    Mutant(
        name="weaker-sign-wins",
        what="ranks whose copies differ count as damaged beside the one whose own hash changed",
        file="trainer/integrity/verdict.py",
        before="if trust is surest)",
        after="if trust > Trust.NOTHING)",
        tests=(_VERDICT,),
    ),
]

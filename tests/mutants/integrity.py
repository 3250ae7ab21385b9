"""Faults in the hashes of the state: of what they cover, whom they name, and what is saved without them."""

from .mutant import Mutant

_HASHING = "tests/unit/trainer/integrity/test_hashing.py"
_VERDICT = "tests/unit/trainer/integrity/test_verdict.py"
_DAMAGE = "tests/unit/trainer/integrity/test_damage.py"
_LAYOUTS = "tests/dist/test_state_hashes.py"
_EVERY_BIT = f"{_DAMAGE}::test_every_bit_names_its_rank_at_once_and_the_run_keeps_its_bits"
_COPIES = f"{_DAMAGE}::test_of_two_copies_the_one_that_the_replay_changes_is_named"
_RECOMPUTE = "tests/unit/trainer/integrity/test_recompute.py"
_FLIPS = (
    f"{_RECOMPUTE}::test_every_flip_before_the_reduction_is_found_and_the_run_keeps_the_bits_of_one_that_recomputes_"
    "nothing"
)
_TWICE = (
    "tests/dist/test_recomputed_gradients.py::test_nothing_differs_without_a_fault_no_bit_changes_and_flips_are_found"
)
_SAVED = f"{_DAMAGE}::test_nothing_damaged_is_saved"

MUTANTS: list[Mutant] = [
    Mutant(
        name="suspicion-ignored",
        what="a step that looks like damage is followed by no comparison before the next one that is due",
        file="trainer/loop.py",
        before="self._is_damaged = self._is_damaged or look_closer(self.trainer, self.line)",
        after="look_closer(self.trainer, self.line)",
        tests=(f"{_DAMAGE}::test_a_step_that_looks_like_damage_is_followed_by_a_comparison",),
    ),
    Mutant(
        name="suspicion-waits-for-the-line",
        what="gradients that were computed twice because of a suspicion are compared at the next log line",
        file="trainer/loop.py",
        before="or is_suspected or is_due(step, config.watch.log_every)",
        after="or is_due(step, config.watch.log_every)",
        tests=(f"{_RECOMPUTE}::test_after_a_step_that_looks_like_damage_the_next_one_is_computed_twice",),
    ),
    Mutant(
        name="suspicion-not-recomputed",
        what="the gradients of the step after a suspicion are computed once",
        file="trainer/integrity/recompute.py",
        before="or self.suspects_damage or is_chosen",
        after="or is_chosen",
        tests=(f"{_RECOMPUTE}::test_after_a_step_that_looks_like_damage_the_next_one_is_computed_twice",),
    ),
    Mutant(
        name="damage-without-end",
        what="a run whose state is damaged in another step each time goes back for ever",
        file="trainer/damage.py",
        before="if not most or times < most:",
        after="if True:",
        tests=(f"{_DAMAGE}::test_damage_in_other_steps_each_time_ends_the_run",),
    ),
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
        before="any_damaged, unchanged = bool(rows[:, 2].any()), rows[:, 3:5]",
        after="any_damaged, unchanged = damaged, rows[:, 3:5]",
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
    Mutant(
        name="gradients-not-read",
        what="gradients are reduced, and nobody has seen them before",
        file="trainer/parallel/zero.py",
        before="        if self._reader is None:\n            return True\n",
        after="        if True:\n            return True\n",
        tests=(f"{_FLIPS}[0]",),
    ),
    Mutant(
        name="gradients-of-shards-not-read",
        what="gradients of ZeRO-3 are reduced, and nobody has seen them before",
        file="trainer/parallel/fsdp.py",
        before="        self._reader.take(self._number, whole)\n",
        after="",
        tests=(f"{_FLIPS}[3]",),
    ),
    Mutant(
        name="recomputed-gradients-reduced",
        what="gradients of ZeRO-3 that are only compared are reduced over copies of the model",
        file="trainer/parallel/fsdp.py",
        before="            drop_partial_sums(unit)\n",
        after="            pass\n",
        tests=(f"{_TWICE}[copies of whole shards]",),
    ),
    Mutant(
        name="recomputed-gradients-kept",
        what="gradients that are only compared are added to those of the step",
        file="trainer/parallel/bucket.py",
        before="            slot.fresh = True\n\n    def place_of",
        after="            pass\n\n    def place_of",
        tests=(f"{_TWICE}[copies]",),
    ),
    Mutant(
        name="recomputed-noise-of-another-rank",
        what="experts are chosen with the noise of the rank that computes, not of the one that the batch belongs to",
        file="trainer/parallel/pipeline.py",
        before="self.data_ranks + step.data_rank) * own",
        after="self.data_ranks + self.data_rank) * own",
        tests=(f"{_TWICE}[experts]",),
    ),
    Mutant(
        name="recomputed-within-a-group-of-experts",
        what="ranks of one group of experts compute parts of the batch of each other",
        file="schema/parallel.py",
        before="return self.ep // math.gcd(self.ep, self.cp * self.tp)",
        after="return 1",
        tests=(f"{_TWICE}[experts]",),
    ),
    Mutant(
        name="recomputed-counts-kept",
        what="the load of experts counts tokens of other ranks",
        file="trainer/integrity/recompute.py",
        before="        router.seen = None\n",
        after="        pass\n",
        tests=(f"{_TWICE}[experts]",),
    ),
    Mutant(
        name="recomputed-terms-kept",
        what="the means of loss terms count tokens of other ranks",
        file="trainer/integrity/recompute.py",
        before="        term.sums = own\n",
        after="        pass\n",
        tests=(f"{_RECOMPUTE}::test_counts_of_routers_sums_of_loss_terms_and_random_states_stay",),
    ),
    Mutant(
        name="recomputed-not-compared",
        what="the hashes of gradients are not compared",
        file="trainer/integrity/recompute.py",
        before="* self._shift) != rows[:, at, 0]).any())",
        after="* self._shift) != rows[:, at, 0]).all())",
        tests=(f"{_FLIPS}[0]",),
    ),
    Mutant(
        name="recomputed-in-the-same-place",
        what="of each block of steps, the same one is computed twice",
        file="trainer/integrity/recompute.py",
        before='return place == derive(seed, "recompute", block) % every',
        after="return place == 0",
        tests=(f"{_RECOMPUTE}::test_each_block_of_steps_has_one_chosen_step",),
    ),
    Mutant(
        name="replay-not-recomputed",
        what="steps that are trained again are computed twice only if they were chosen",
        file="trainer/integrity/recompute.py",
        before="return is_replayed or self.suspects_damage or is_chosen",
        after="return self.suspects_damage or is_chosen",
        tests=(f"{_RECOMPUTE}::test_only_chosen_steps_are_computed_twice_until_there_is_damage",),
    ),
    Mutant(
        name="no-third-opinion",
        what="steps that are trained again are not computed by a third rank",
        file="trainer/integrity/recompute.py",
        before="opinions = min(2 if self.replayed is not None else 1, groups - 1)",
        after="opinions = 1",
        tests=(f"{_RECOMPUTE}::test_of_three_ranks_the_one_that_is_damaged_again_is_named",),
    ),
    Mutant(
        name="first-gradients-forgotten",
        what="of two ranks nobody is named, because the gradients of the first time are forgotten",
        file="trainer/integrity/recompute.py",
        before="return frozenset(changed) or ranks",
        after="return ranks",
        tests=(f"{_RECOMPUTE}::test_of_two_ranks_the_one_that_computes_otherwise_than_the_first_time_is_named",),
    ),
    Mutant(
        name="varying-gradients-blamed",
        what="a machine is blamed for kernels whose results vary",
        file="trainer/integrity/recompute.py",
        before="            if (rows[:, -1] != rows[:, 0]).all():\n",
        after="            if False:\n",
        tests=(f"{_RECOMPUTE}::test_kernels_that_find_other_bits_each_time_are_no_fault_of_a_machine",),
    ),
]

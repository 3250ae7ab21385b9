"""Faults in the commands on checkpoints: what `ingot ckpt` shows, compares, removes and leaves."""

from .mutant import Mutant

_COMPARE = "tests/unit/trainer/checkpoint/test_compare.py"
_DEEP = "tests/unit/trainer/launch/test_deep.py"
_GARBAGE = "tests/unit/trainer/launch/test_garbage.py"
_INTERRUPTED = "tests/unit/trainer/launch/test_interrupted.py"
_LISTING = "tests/unit/trainer/launch/test_listing.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="lost-object-unseen",
        what="ingot ckpt ls shows a stored checkpoint as whole that lacks a file",
        file="trainer/checkpoint/stored.py",
        before="if found != entry.bytes:",
        after="if False:",
        tests=(f"{_LISTING}::test_damage_late_ones_and_half_uploads_are_marked",),
    ),
    Mutant(
        name="silent-store-hides-the-disk",
        what="ingot ckpt ls shows nothing while the store does not answer",
        file="trainer/launch/listing.py",
        before="        problem = error\n",
        after="        raise error\n",
        tests=(f"{_LISTING}::test_a_store_that_does_not_answer_leaves_the_disk_and_a_line",),
    ),
    Mutant(
        name="listing-reads-every-manifest",
        what="ingot ckpt ls reads the manifest of every stored checkpoint, also of those on the disk",
        file="trainer/checkpoint/stored.py",
        before="if late or manifest is None or self._missing(step, manifest, names | ledger):",
        after="if True:",
        tests=(f"{_LISTING}::test_only_manifests_and_listings_are_read",),
    ),
    Mutant(
        name="interrupted-transfer-goes-on",
        what="Ctrl-C during a fetch waits until all files under way have arrived",
        file="trainer/checkpoint/pace.py",
        before="                    self._stopped.set()\n",
        after="",
        tests=(f"{_INTERRUPTED}::test_a_real_ctrl_c_during_a_fetch_from_a_slow_store",),
    ),
    Mutant(
        name="interrupted-fetch-leaves-files",
        what="a fetch that was interrupted leaves its unfinished folder",
        file="trainer/checkpoint/fetch.py",
        before="        except BaseException:\n            shutil.rmtree(temporary",
        after="        except Exception:\n            shutil.rmtree(temporary",
        tests=(f"{_INTERRUPTED}::test_a_real_ctrl_c_during_a_fetch_from_a_slow_store",),
    ),
    Mutant(
        name="interrupted-between-renames",
        what="Ctrl-C between the two renames of a publication takes the old checkpoint's name",
        file="trainer/checkpoint/folders.py",
        before="            aside.rename(path)\n        raise",
        after="            pass\n        raise",
        tests=(f"{_INTERRUPTED}::test_ctrl_c_between_the_renames_gives_the_old_checkpoint_its_name_back",),
    ),
    Mutant(
        name="diff-reads-the-first-block",
        what="ingot ckpt diff compares the first block of a tensor again and again",
        file="trainer/checkpoint/compare.py",
        before="rest = (*offsets[:dim], offsets[dim] + half, *offsets[dim + 1 :])",
        after="rest = offsets",
        tests=(f"{_COMPARE}::test_the_changes_are_those_of_the_tensors",),
    ),
    Mutant(
        name="diff-poisoned-by-nan",
        what="one NaN hides how much a parameter changed",
        file="trainer/checkpoint/compare.py",
        before="        a, b = a[finite], b[finite]",
        after="        pass",
        tests=(f"{_COMPARE}::test_values_that_are_not_finite_come_first_and_leave_the_figures",),
    ),
    Mutant(
        name="gc-during-an-upload",
        what="ingot ckpt gc removes the objects of an upload that is in progress",
        file="trainer/launch/garbage.py",
        before="as lease, RunLock(folder.upload_lock):",
        after="as lease:",
        tests=(f"{_GARBAGE}::test_nothing_is_removed_while_the_run_trains_or_a_command_uploads",),
    ),
    Mutant(
        name="gc-of-an-unreadable-checkpoint",
        what="ingot ckpt gc removes samples that a checkpoint with a damaged manifest may list",
        file="trainer/launch/garbage.py",
        before="            unknown = max(unknown, int(match[1]) if match else 0)",
        after="            pass",
        tests=(f"{_GARBAGE}::test_what_a_checkpoint_may_need_stays",),
    ),
    Mutant(
        name="gc-of-the-last-proof",
        what="ingot ckpt gc removes the ledger of a run whose checkpoints vanished",
        file="trainer/launch/garbage.py",
        before="        require_checkpoints(folder)",
        after="        pass",
        tests=(f"{_GARBAGE}::test_a_run_whose_checkpoints_vanished_keeps_its_ledger",),
    ),
    Mutant(
        name="gc-forgets-pinned-leftovers",
        what="ingot ckpt gc removes the samples of a checkpoint that was pinned during its removal",
        file="trainer/launch/garbage.py",
        before=", *_removed_but_pinned(folder)]",
        after="]",
        tests=(f"{_GARBAGE}::test_what_a_checkpoint_may_need_stays",),
    ),
    Mutant(
        name="deep-without-loading",
        what="ingot ckpt verify --deep does not load the tensors",
        file="trainer/launch/deep.py",
        before="    load_checkpoint(path, manifest, parts.state, meter.add)\n",
        after="",
        tests=(f"{_DEEP}::test_a_missing_tensor_is_found",),
    ),
    Mutant(
        name="deep-random-state-of-one-rank",
        what="ingot ckpt verify --deep restores the random state of the first rank alone",
        file="trainer/launch/deep.py",
        before="for rank in range(manifest.world):",
        after="for rank in range(1):",
        tests=(f"{_DEEP}::test_a_random_state_that_is_none_is_found_on_every_rank",),
    ),
    Mutant(
        name="deep-without-callbacks",
        what="ingot ckpt verify --deep does not give callbacks their records",
        file="trainer/launch/deep.py",
        before="    parts.callbacks.restore(manifest.callbacks)\n",
        after="",
        tests=(f"{_DEEP}::test_a_callback_that_refuses_its_record_is_found",),
    ),
    Mutant(
        name="deep-blind-to-nan",
        what="ingot ckpt verify --deep takes NaN for a value",
        file="trainer/launch/deep.py",
        before="not bool(tensor.isfinite().all())]",
        after="bool(tensor.isinf().any())]",
        tests=(f"{_DEEP}::test_values_that_are_not_finite_are_named_by_parameter",),
    ),
]

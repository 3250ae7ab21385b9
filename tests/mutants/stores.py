"""Faults in the remote tier of checkpoints and in stores: the order of an upload, hashes, names that are taken."""

from .mutant import Mutant

_REMOTE = "tests/unit/trainer/checkpoint/test_remote.py"
_HOSTILE = "tests/unit/stores/test_hostile_stores.py"
_HOSTILE_TIER = "tests/unit/trainer/checkpoint/test_hostile_tier.py"
_FUZZ = "tests/unit/trainer/checkpoint/test_fuzz.py"
_STORES = "tests/unit/stores/test_stores.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="manifest-replaced",
        what="the manifest of a stored checkpoint may be replaced by another writer",
        file="trainer/checkpoint/remote.py",
        before="self.store.write(name, [text], new=True)",
        after="self.store.write(name, [text])",
        tests=(f"{_REMOTE}::test_a_listing_that_is_late_lets_nobody_replace_a_checkpoint",),
    ),
    Mutant(
        name="manifest-removed-last",
        what="the manifest of a stored checkpoint goes after its files",
        file="trainer/checkpoint/remote.py",
        before="one.name != self._name(step, MANIFEST)",
        after="one.name == self._name(step, MANIFEST)",
        tests=(f"{_REMOTE}::test_killed_at_every_operation_of_an_upload_the_store_never_shows_a_torn_checkpoint",),
    ),
    Mutant(
        name="fetched-unhashed",
        what="what comes from the store is not compared with its hash",
        file="trainer/checkpoint/fetch.py",
        before="            if digest.hexdigest() != sha256:\n                raise damaged(stored",
        after="            if False:\n                raise damaged(stored",
        tests=(f"{_REMOTE}::test_a_flipped_bit_in_the_store_is_named_and_the_next_older_checkpoint_comes",),
    ),
    Mutant(
        name="sent-unhashed",
        what="a local file that was damaged after the save goes up",
        file="trainer/checkpoint/remote.py",
        before="        if digest.hexdigest() != sha256:\n            self.store.remove(name)",
        after="        if False:\n            self.store.remove(name)",
        tests=(f"{_REMOTE}::test_a_damaged_local_file_does_not_go_up",),
    ),
    Mutant(
        name="step-0-without-the-store",
        what="a run without local checkpoints starts at step 0 while the store does not answer",
        file="trainer/checkpoint/tiers.py",
        before="if not candidate_folders(folder.checkpoints):",
        after="if False:",
        tests=(f"{_REMOTE}::test_without_an_answer_a_run_continues_only_from_a_local_checkpoint",),
    ),
    Mutant(
        name="refusal-without-the-way-out",
        what="the event of an upload that was refused does not say what to do",
        file="trainer/checkpoint/uploader.py",
        before="code, reason, fix = error.code, error.found, error.fix",
        after="code, reason = error.code, error.found",
        tests=(f"{_REMOTE}::test_an_upload_that_cannot_succeed_is_reported_once_with_the_way_out",),
    ),
    Mutant(
        name="stored-unchecked",
        what="what a store holds is not compared with what was sent",
        file="stores/objects.py",
        before="if tag in hashes.tags():",
        after="if True:",
        tests=(f"{_STORES}::test_a_store_that_changed_the_bytes_is_noticed",),
    ),
    Mutant(
        name="store-without-fsync",
        what="a file of a store has its name before its data is on the disk",
        file="stores/local.py",
        before="                os.fsync(file.fileno())\n",
        after="",
        tests=(f"{_STORES}::test_a_file_is_on_the_disk_before_it_has_its_name",),
    ),
    Mutant(
        name="taken-name",
        what="of two writers of a new name in a folder the second one wins",
        file="stores/local.py",
        before="os.link(temporary, path)",
        after="temporary.replace(path)",
        tests=(f"{_STORES}::test_of_two_writers_of_a_new_name_one_succeeds",),
    ),
    Mutant(
        name="lost-answer-given-up",
        what="an upload whose last answer was lost counts as one that cannot succeed",
        file="stores/objects.py",
        before="        with self._answer_lost(name), self._translated(name):",
        after="        with self._translated(name):",
        tests=(f"{_HOSTILE}::test_a_fault_that_happens_once_costs_a_repetition",),
    ),
    Mutant(
        name="bucket-gone-unnoticed",
        what="removing an object of a bucket that does not exist succeeds",
        file="stores/objects.py",
        before="""        if "NoSuchBucket" in str(error):""",
        after="""        if False:""",
        tests=(f"{_HOSTILE}::test_a_fault_that_stays_is_an_error_without_a_secret",),
    ),
    Mutant(
        name="late-listing-prunes",
        what="a checkpoint whose manifest a late listing lacks is removed as an upload that never ended",
        file="trainer/checkpoint/remote.py",
        before="or not self._has_manifest(step)",
        after="or True",
        tests=(f"{_REMOTE}::test_a_listing_that_lacks_a_manifest_removes_no_checkpoint",),
    ),
    Mutant(
        name="removed-checkpoint-stops-a-start",
        what="a listing that shows a removed checkpoint ends the start of a run",
        file="trainer/checkpoint/fetch.py",
        before="except (CheckpointError, NotStored) as error:",
        after="except CheckpointError as error:",
        tests=(f"{_REMOTE}::test_a_listing_that_shows_a_removed_checkpoint_leads_to_the_next_older",),
    ),
    Mutant(
        name="damaged-manifest-stays",
        what="a manifest that a store damaged on its way in refuses every further attempt of its upload",
        file="stores/objects.py",
        before="                self.remove(name)  # this write made it",
        after="                pass  # this write made it",
        tests=(f"{_HOSTILE_TIER}::test_a_fault_at_every_request_of_an_upload_leaves_a_whole_checkpoint",),
    ),
    Mutant(
        name="checksum-overflow",
        what="a checksum beyond its bits in a manifest of version 1 ends the run with a traceback",
        file="trainer/checkpoint/manifest.py",
        before="AttributeError, OverflowError) as error:",
        after="AttributeError) as error:",
        tests=(f"{_FUZZ}::test_a_checksum_beyond_its_bits_is_refused",),
    ),
    Mutant(
        name="random-state-unchecked",
        what="a random state that is none ends the run with a traceback",
        file="trainer/checkpoint/load.py",
        before="except (RuntimeError, TypeError, ValueError, OSError, safetensors.SafetensorError) as error:",
        after="except (OSError, safetensors.SafetensorError) as error:",
        tests=(f"{_FUZZ}::test_a_random_state_that_is_none_is_refused",),
    ),
]

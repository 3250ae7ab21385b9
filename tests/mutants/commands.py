"""Faults in the commands on checkpoints: what `ingot ckpt` shows, compares, removes and leaves."""

from .mutant import Mutant

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
        before="        stored, problem = [], error",
        after="        raise error",
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
]

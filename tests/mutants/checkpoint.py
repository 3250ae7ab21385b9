"""Faults in checkpoints: hashes, the order of writes, pruning, blocks of other layouts, moments."""

from .mutant import Mutant

_SAVE = "tests/unit/trainer/checkpoint/test_save.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="hash-of-other-files",
        what="ranks of a smaller job hash the first files of a checkpoint and leave out the rest",
        file="trainer/checkpoint/load.py",
        before="sorted(manifest.files)[rank() :: world()]",
        after="sorted(manifest.files)[rank() : world()]",
        tests=("tests/dist/test_reshard.py::test_all_ranks_fall_back_to_the_same_checkpoint",),
    ),
    Mutant(
        name="hash-not-checked",
        what="a file counts as undamaged if its size is right",
        file="trainer/checkpoint/manifest.py",
        before="same = sha256_file(folder / name) == entry.sha256",
        after="same = (folder / name).stat().st_size == entry.bytes",
        tests=("tests/unit/trainer/checkpoint/test_load.py::test_falls_back_over_damaged_ones_and_says_why",),
    ),
    Mutant(
        name="not-read-back",
        what="a file that was written is compared by its size instead of being read back from the disk",
        file="trainer/checkpoint/tensor_file.py",
        before="if not _holds(path, header, data()):",
        after="if path.stat().st_size != file.bytes:",
        tests=("tests/unit/trainer/checkpoint/test_tensor_file.py::test_a_disk_that_lies_is_noticed",),
    ),
    Mutant(
        name="read-back-of-whole-chunks",
        what="of what is read back, the end of each tensor is not compared",
        file="trainer/checkpoint/tensor_file.py",
        before="or found != chunk:",
        after="or (found != chunk and len(chunk) == _CHUNK):",
        tests=("tests/unit/trainer/checkpoint/test_tensor_file.py::test_a_disk_that_lies_is_noticed",),
    ),
    Mutant(
        name="prune-counts-damaged",
        what="an unfinished checkpoint counts among those that are kept",
        file="trainer/checkpoint/folders.py",
        before="elif path == folder.checkpoint(step) or is_finished(path):",
        after="else:",
        tests=(f"{_SAVE}::test_damaged_ones_do_not_count_as_kept",),
    ),
    Mutant(
        name="prune-counts-suspect",
        what="a checkpoint of doubtful weights counts among those that are kept",
        file="trainer/checkpoint/folders.py",
        before="suspect = is_suspect(path)",
        after="suspect = False",
        tests=(f"{_SAVE}::test_suspect_ones_do_not_count_as_kept",),
    ),
    Mutant(
        name="reshard-part-of-a-block",
        what="of a stored block that is read in part, the first rows are read instead of the wanted ones",
        file="trainer/checkpoint/load.py",
        before="source = file.get_slice(chunk.key)[slices(shared, chunk.offsets)]",
        after="source = file.get_slice(chunk.key)[slices((chunk.offsets, shared[1]), chunk.offsets)]",
        tests=("tests/dist/test_reshard.py::test_any_layout_loads_any_other",),
    ),
    Mutant(
        name="moments-swapped",
        what="files hold each moment of AdamW under the name of the other; saving and loading agree",
        file="trainer/checkpoint/state.py",
        before='name = f"{OPTIM}{kind}.{piece.name}"',
        after="name = f\"{OPTIM}{dict(exp_avg='exp_avg_sq', exp_avg_sq='exp_avg').get(kind, kind)}.{piece.name}\"",
        tests=("tests/unit/trainer/checkpoint/test_state.py::test_the_names_on_the_disk",),
    ),
    Mutant(
        name="random-state-of-rank-0",
        what="after a resume, all ranks continue with the random state of rank 0",
        file="trainer/checkpoint/load.py",
        before="restore_random_state(path / file_of(rank()))",
        after="restore_random_state(path / file_of(0))",
        tests=("tests/dist/test_reshard.py::test_replicas_write_their_random_state_only_and_every_rank_gets_its_own",),
    ),
    Mutant(
        name="finished-in-part",
        what="a checkpoint counts as finished if one of its files has the right size",
        file="trainer/checkpoint/manifest.py",
        before="return all((folder / name).stat().st_size == entry",
        after="return any((folder / name).stat().st_size == entry",
        tests=(
            "tests/unit/trainer/checkpoint/test_manifest.py::test_every_file_of_a_finished_checkpoint_has_its_size",
        ),
    ),
]

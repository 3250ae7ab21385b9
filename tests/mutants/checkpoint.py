"""Faults in checkpoints: hashes, the order of writes, pruning, blocks of other layouts, moments."""

from .mutant import Mutant

MUTANTS: list[Mutant] = [
    Mutant(
        name="hash-of-other-files",
        what="ranks of a smaller job hash the first files of a checkpoint and leave out the rest",
        file="trainer/checkpoint/load.py",
        before="sorted(manifest.files)[rank() :: world()]",
        after="sorted(manifest.files)[rank() : world()]",
        tests=("tests/dist/test_reshard.py",),
    ),
    Mutant(
        name="hash-of-old-bytes",
        what="a file counts as undamaged if its size is right",
        file="trainer/checkpoint/manifest.py",
        before="same = sha256_file(folder / name) == entry.sha256",
        after="same = len(sha256_file(folder / name)) == len(entry.sha256)",
        tests=("tests/unit/trainer/checkpoint/test_load.py",),
    ),
    Mutant(
        name="manifest-before-its-place",
        what="a checkpoint gets its name before it gets its manifest",
        file="trainer/checkpoint/save.py",
        before="        write_manifest(self.temporary, manifest)\n"
        "        fsync_dir(self.temporary)\n"
        "        publish(self.folder, self.facts.step)\n",
        after="        publish(self.folder, self.facts.step)\n"
        "        write_manifest(self.path, manifest)\n"
        "        fsync_dir(self.path)\n",
        tests=("tests/unit/trainer/checkpoint/test_save.py",),
    ),
    Mutant(
        name="prune-counts-damaged",
        what="an unfinished checkpoint counts among those that are kept",
        file="trainer/checkpoint/folders.py",
        before="whole += path == folder.checkpoint(step) or is_finished(path)",
        after="whole += 1",
        tests=("tests/unit/trainer/checkpoint/test_save.py",),
    ),
    Mutant(
        name="reshard-part-of-a-block",
        what="of a stored block that is read in part, the rows are counted from the start of the tensor's own block",
        file="trainer/checkpoint/load.py",
        before="source = file.get_slice(chunk.key)[slices(shared, chunk.offsets)]",
        after="source = file.get_slice(chunk.key)[slices((block.offsets, shared[1]), block.offsets)]",
        tests=("tests/dist/test_reshard.py::test_any_layout_loads_any_other",),
    ),
    Mutant(
        name="moments-swapped",
        what="files hold each moment of AdamW under the name of the other; saving and loading agree",
        file="trainer/checkpoint/state.py",
        before='name = f"{OPTIM}{kind}.{piece.name}"',
        after="name = f\"{OPTIM}{dict(exp_avg='exp_avg_sq', exp_avg_sq='exp_avg').get(kind, kind)}.{piece.name}\"",
        tests=("tests/unit/trainer/checkpoint/test_state.py",),
    ),
]

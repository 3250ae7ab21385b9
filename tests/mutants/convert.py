"""Faults in what reads the files of other systems, and writes checkpoints in another layout."""

from .mutant import Mutant

_RESHARDED = "tests/dist/test_resharded.py"
_DCP = "tests/unit/trainer/convert/test_dcp.py"
_IMPORT = "tests/unit/trainer/convert/test_import.py"
_PICKLED = "tests/unit/trainer/convert/test_pickled.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="pickle-of-any-name",
        what="a pickle may name any function",
        file="trainer/convert/pickled.py",
        before="if text not in self._expected:",
        after="if not text:",
        tests=(f"{_PICKLED}::test_names_that_are_not_expected_are_refused",),
    ),
    Mutant(
        name="pickle-without-limit",
        what="the objects of a pickle are counted, but there is no limit",
        file="trainer/convert/pickled.py",
        before="if self._left < 0:",
        after="if self._left == 0:",
        tests=(f"{_PICKLED}::test_objects_count_against_the_memory",),
    ),
    Mutant(
        name="dcp-path",
        what="metadata may name any .distcp file, also outside of the folder",
        file="trainer/convert/dcp.py",
        before="Path(file).name != file or not file.endswith",
        after="not file.endswith",
        tests=(f"{_DCP}::test_places_outside_of_the_folder_are_refused",),
    ),
    Mutant(
        name="dcp-shared-bytes",
        what="two blocks may have the same bytes, so a small file can claim any amount of memory",
        file="trainer/convert/dcp.py",
        before="after[1] < before[2]",
        after="after[1] < before[1]",
        tests=(f"{_DCP}::test_blocks_that_share_bytes_are_refused",),
    ),
    Mutant(
        name="dcp-tiling",
        what="blocks may overlap and leave elements unset",
        file="trainer/convert/dcp.py",
        before="if problem := tiling_problem(entry.shape, entry.blocks):",
        after="if problem := tiling_problem(entry.shape, entry.blocks[:1]) and not entry.blocks:",
        tests=(f"{_DCP}::test_two_shards_that_overlap_are_refused",),
    ),
    Mutant(
        name="dcp-dtype",
        what="the dtype of an archive is not compared with that of the metadata",
        file="trainer/convert/dcp_block.py",
        before="(shape, str(_STORAGES[kind])) != (sizes, dtype)",
        after="shape != sizes",
        tests=(f"{_DCP}::test_a_dtype_that_differs_or_is_not_read_is_refused",),
    ),
    Mutant(
        name="torchtitan-keys",
        what="the rows of keys stay in torchtitan's order, those of queries do not",
        file="trainer/convert/names.py",
        before='ours.endswith(("attention.q.weight", "attention.k.weight"))',
        after='ours.endswith("attention.q.weight")',
        tests=(f"{_IMPORT}::test_torchtitans_names",),
    ),
    Mutant(
        name="reshard-memory",
        what="all blocks of a rank are read together, as much memory as its file",
        file="trainer/convert/reshard.py",
        before="if waiting and held + part.bytes > _TOGETHER_BYTES:",
        after="if waiting and part.bytes > _TOGETHER_BYTES:",
        tests=(f"{_RESHARDED}::test_memory_is_that_of_some_blocks",),
    ),
    Mutant(
        name="reshard-random-states",
        what="random states are lost although the number of ranks is the same",
        file="trainer/convert/reshard.py",
        before="if same_world and not manifest.rng else []",
        after="if same_world and manifest.rng else []",
        tests=(f"{_RESHARDED}::test_training_goes_on_as_from_the_checkpoint_itself[copies, as many ranks]",),
    ),
    Mutant(
        name="reshard-step-everywhere",
        what="the scalar moments of a parameter get the shape of its block",
        file="trainer/convert/layout_blocks.py",
        before="() if not manifest.tensors[name].shape else piece.sizes",
        after="piece.sizes",
        tests=(f"{_RESHARDED}::test_equals_what_the_ranks_of_that_layout_save[context]",),
    ),
    Mutant(
        name="reshard-later-tensors",
        what="tensors that the model of the run file lacks are left out",
        file="trainer/convert/reshard.py",
        before="manifest.tensors.keys() - tensors.keys()",
        after="tensors.keys() - manifest.tensors.keys()",
        tests=(f"{_RESHARDED}::test_a_run_file_of_another_model_is_refused",),
    ),
    Mutant(
        name="reshard-accepted",
        what="the new run gets the accepted changes of later steps of the old run",
        file="trainer/convert/reshard.py",
        before="if earlier is None:  # a",
        after="if not earlier:  # a",
        tests=(f"{_RESHARDED}::test_paths_changes_and_ledger_come_along",),
    ),
    Mutant(
        name="init-from-here",
        what="a run file names the folder of its first weights relative to the folder in which it was made",
        file="planner/request/plan_request.py",
        before="replace(run, init=relative(model.init, relative_to))",
        after="replace(run, init=relative(model.init, Path()))",
        tests=("tests/unit/planner/request/test_presets.py::test_a_project_starts_from_the_weights_of_a_folder",),
    ),
    Mutant(
        name="convert-over-a-folder",
        what="a folder with files in it counts as free",
        file="trainer/convert/new_folder.py",
        before="not (out.is_dir() and not any(out.iterdir()))",
        after="not out.is_dir()",
        tests=("tests/unit/trainer/convert/test_new_folder.py::test_what_exists_is_never_replaced",),
    ),
    Mutant(
        name="convert-leftovers",
        what="a failed conversion leaves its temporary folder",
        file="trainer/convert/new_folder.py",
        before="    finally:\n        shutil.rmtree(temporary, ignore_errors=True)\n",
        after="    finally:\n        pass\n",
        tests=("tests/unit/trainer/convert/test_new_folder.py::test_nothing_is_left_after_an_error",),
    ),
]

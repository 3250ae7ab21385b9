"""Faults in plug-ins: their import and identity, the checks of their parts, whole matrices, callbacks."""

from .mutant import Mutant

_LOAD = "tests/unit/plugins/test_load.py"
_REGISTRY = "tests/unit/plugins/test_registry.py"
_MATRICES = "tests/dist/test_matrices.py"
_CALLBACKS = "tests/unit/trainer/test_callbacks.py"
_GUARDS = "tests/unit/trainer/test_callback_guards.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="code-of-one-file",
        what="the identity of a package's module ignores the other files of the package",
        file="plugins/load.py",
        before='files = sorted(file.parent.rglob("*.py")) if in_package else [file]',
        after="files = [file]",
        tests=(f"{_LOAD}::test_the_identity_of_a_package_is_that_of_all_its_files",),
    ),
    Mutant(
        name="code-without-names",
        what="a file of a package that gets another name leaves the identity of its code as it was",
        file="plugins/load.py",
        before='digest.update(f"{path.relative_to(file.parent).as_posix()} {len(content)}\\n".encode() + content)',
        after='digest.update(f"{len(content)}\\n".encode() + content)',
        tests=(f"{_LOAD}::test_the_identity_of_a_package_is_that_of_all_its_files",),
    ),
    Mutant(
        name="parts-that-stay",
        what="the parts of a changed plug-in stay beside those of its new code",
        file="plugins/load.py",
        before="            registry.forget(plugin)",
        after="            registry.forget(f'{plugin}.py')",
        tests=(f"{_LOAD}::test_a_changed_file_is_imported_again_without_its_old_parts",),
    ),
    Mutant(
        name="plug-in-of-another-run",
        what="a part is accepted because this process imported its plug-in for another run",
        file="theory/rules/parts.py",
        before="if module not in (INGOT, MAIN, *run.plugins.modules):",
        after="if module not in (INGOT, MAIN, module, *run.plugins.modules):",
        tests=(f"{_REGISTRY}::test_a_part_needs_its_plug_in_in_the_run_file",),
    ),
    Mutant(
        name="options-not-checked",
        what="the settings of a chosen part are not checked before the run starts",
        file="theory/rules/parts.py",
        before="yield from options_problems(registry[name], options, table)",
        after="yield from options_problems(registry[name], {}, table)",
        tests=(f"{_REGISTRY}::test_a_wrong_part_or_setting_is_reported_with_its_line",),
    ),
    Mutant(
        name="block-sent-twice",
        what="every rank that holds a block of a matrix sends it, also where another rank has sent it",
        file="trainer/optim/matrices.py",
        before="sends=where not in seen)",
        after="sends=True)",
        tests=(f"{_MATRICES}::test_the_placement_is_that_of_the_real_shards",),
    ),
    Mutant(
        name="state-of-senders",
        what="only the rank that sends a block updates its momentum",
        file="trainer/optim/matrices.py",
        before="directions = [[(b, pieces.direction(name, b)) for name, b in blocks] for blocks in own]",
        after="directions = [[(b, pieces.direction(name, b)) for name, b in blocks if b.sends] for blocks in own]",
        tests=(f"{_MATRICES}::test_every_layout_equals_one_process",),
    ),
    Mutant(
        name="matrix-by-pieces",
        what="the worker of a matrix computes the update of each block alone",
        file="trainer/optim/matrices.py",
        before="back = [[block.of_matrix(updates[i]) for i, block in blocks] for blocks in mine]",
        after="back = [[self._of_matrix(by_worker[self.own][i].name, b.of_matrix(updates[i])) for i, b in blocks]"
        " for blocks in mine]",
        tests=(f"{_MATRICES}::test_every_layout_equals_one_process[zero 1]",),
    ),
    Mutant(
        name="experts-as-one-matrix",
        what="the experts of a layer are made orthogonal together, as one matrix",
        file="trainer/optim/matrices.py",
        before="rows = parameter.shape[0] // parameter.stack",
        after="rows = parameter.shape[0]",
        tests=(f"{_MATRICES}::test_the_placement_is_that_of_the_real_shards[ep]",),
    ),
    Mutant(
        name="placement-of-even-rows",
        what="a rank that owns fewer rows than others counts as one that owns as many",
        file="trainer/parallel/units.py",
        before="return PlacedBlock(rank, (offsets[0] + rows.start, *offsets[1:]), (len(rows), *sizes[1:]))",
        after="part = -(-sizes[0] // mesh.size(cut.view))\n"
        "    return PlacedBlock(rank, (offsets[0] + rows.start, *offsets[1:]), (part, *sizes[1:]))",
        tests=(f"{_MATRICES}::test_the_placement_is_that_of_the_real_shards",),
    ),
    Mutant(
        name="veto-of-matrices",
        what="the momentum of whole matrices changes in a vetoed step",
        file="trainer/optim/matrices.py",
        before="keep(own[kind], tensor, self.found_inf)",
        after="keep(own[kind], tensor, None)",
        tests=(f"{_MATRICES}::test_a_vetoed_step_leaves_values_and_state[zero 1]",),
    ),
    Mutant(
        name="keep-forgets-the-veto",
        what="a rule's new values and state are kept in a vetoed step",
        file="plugins/optimizer.py",
        before="old.copy_(new if found_inf is None else old.where(found_inf.bool(), new))",
        after="old.copy_(new)",
        tests=(f"{_MATRICES}::test_a_vetoed_step_leaves_values_and_state[zero 1]",),
    ),
    Mutant(
        name="scale-of-matrices",
        what="gradients of whole matrices are not clipped",
        file="trainer/optim/matrices.py",
        before="gradient = gradient if self.scale is None else gradient * self.scale",
        after="gradient = gradient if self.scale is None else gradient + 0 * self.scale",
        tests=(f"{_MATRICES}::test_momentum_is_that_of_clipped_gradients",),
    ),
    Mutant(
        name="verdict-ignored",
        what="the verdict of callbacks is asked for and ignored",
        file="trainer/loop.py",
        before="self.trainer.callbacks.line(self.line, self.trainer.log))",
        after="self.trainer.callbacks.line(self.line, self.trainer.log) and self.verdict)",
        tests=(f"{_CALLBACKS}::test_a_verdict_to_stop_saves_and_stops",),
    ),
    Mutant(
        name="last-verdict",
        what="the verdict of the last callback counts, not the most urgent one",
        file="trainer/callbacks.py",
        before="asked = max(asked, mine)",
        after="asked = mine",
        tests=(f"{_CALLBACKS}::test_the_most_urgent_verdict_counts",),
    ),
    Mutant(
        name="verdict-of-one-rank",
        what="a verdict that differs between ranks is taken from each rank",
        file="trainer/callbacks.py",
        before="if highest != -lowest:",
        after="if highest < -lowest:",
        tests=(f"{_CALLBACKS}::test_a_verdict_is_the_same_on_all_ranks",),
    ),
    Mutant(
        name="record-not-restored",
        what="a roll-back takes back the tensors of callbacks, but not their records",
        file="trainer/save.py",
        before="parts.callbacks.restore(restored.callbacks)",
        after="parts.callbacks.restore({})",
        tests=(f"{_CALLBACKS}::test_a_verdict_to_roll_back_takes_tensors_and_record_back",),
    ),
    Mutant(
        name="tensors-of-callbacks-whole",
        what="every rank writes its block of a callback's tensor as the whole tensor",
        file="trainer/checkpoint/state.py",
        before='blocks += [_block(f"{CALLBACK}{name}.{p.name}", own, p, optional=True) for p, own in by_piece]',
        after='blocks += [_everywhere(f"{CALLBACK}{name}.{p.name}", own, first_rank, optional=True)'
        " for p, own in by_piece]",
        tests=(f"{_CALLBACKS}::test_another_layout_takes_the_state_over",),
    ),
    Mutant(
        name="gradients-of-the-step-before",
        what="callbacks get the number of the step before with the gradients",
        file="trainer/step.py",
        before="    parts.callbacks.gradients(step)\n",
        after="    parts.callbacks.gradients(step - 1)\n",
        tests=(f"{_CALLBACKS}::test_callbacks_see_gradients_before_clipping_in_every_layout",),
    ),
    Mutant(
        name="gradients-kept",
        what="a callback that keeps gradients, and so their memory, goes unnoticed",
        file="trainer/callbacks.py",
        before="if self._lent == [] and self._own:",
        after="if self._lent is None and self._own:",
        tests=(f"{_GUARDS}::test_gradients_that_are_kept_beyond_the_first_step_are_noticed",),
    ),
    Mutant(
        name="pieces-left-out",
        what="a callback without a tensor for one of the pieces is accepted",
        file="trainer/callbacks.py",
        before="if wrong := [n for n in own | found if own.get(n) != found.get(n)]:",
        after="if wrong := [n for n in found if own.get(n) != found[n]]:",
        tests=(f"{_GUARDS}::test_tensors_of_another_shape_than_the_pieces_are_refused",),
    ),
]

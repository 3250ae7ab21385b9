"""The usual causes of numbers that are not finite, each with what a run and its replay show for or against it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ingot.rehearse.replay.found import NotFiniteOrigin, Replayed, TensorRange
from ingot.report.diagnose.not_finite import NotFiniteCase
from ingot.schema.accepted import command_with_rate

# The largest finite value of each dtype, and the largest argument whose exponential is finite.
LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.403e38, "float64": 1.798e308}
_EXPONENTIALS = ("exp", "softmax", "logsumexp", "sinh", "cosh")
_DIVISIONS = ("div", "reciprocal", "rsqrt", "log")
_WHOLE_UPDATE = 1.0  # an update as large as the weights replaces them; a healthy one is about a thousandth of them


@dataclass(frozen=True, kw_only=True)
class NotFiniteCause:
    """A cause. found: the evidence is for it; False: against it. fix: what to do about it. command: that continues the
    run so; "": `ingot train RUN`."""

    name: str
    found: bool
    evidence: str
    fix: str
    command: str = ""


def judge(case: NotFiniteCase, replayed: Replayed) -> list[NotFiniteCause]:
    """Return every cause with its evidence: those that were found first, the one that explains the others before them.

    If the replay is finite, the cause is not in the run's files. A step that is finite in the log, too, has no cause.
    """
    causes = [detect(case, replayed) for detect in _DETECTORS]
    return sorted(causes, key=lambda cause: not cause.found)


def corrupted_load(case: NotFiniteCase, replayed: Replayed) -> NotFiniteCause:
    if not replayed.loaded_bad:
        begin = f"checkpoint of step {replayed.checkpoint}" if replayed.checkpoint else "first weights"
        evidence = f"all weights and moments of the {begin} are finite"
    else:
        names = ", ".join(f"{one.name} ({one.nan + one.infinite:,} elements)" for one in replayed.bad_state[:4])
        more = f" and {len(replayed.bad_state) - 4} more" if len(replayed.bad_state) > 4 else ""
        last = "no older checkpoint has them finite"
        if replayed.finite_at is not None:
            last = f"the checkpoint of step {replayed.finite_at} is the last one in which they are finite"
        evidence = f"the checkpoint of step {replayed.checkpoint} has NaN or infinity in {names}{more}; {last}"
    newer = f"step-{replayed.checkpoint:08d} and newer ones" if replayed.checkpoint else "it"
    return NotFiniteCause(
        name="corrupted load",
        found=replayed.loaded_bad,
        evidence=evidence,
        fix=f"move {newer} out of {case.root}/checkpoints, then continue: ingot train {case.root}. Find out what wrote "
        "it: ingot itself saves no such values",
    )


def learning_rate(case: NotFiniteCase, replayed: Replayed) -> NotFiniteCause:
    largest = max((one for one in replayed.steps if not one.skipped), key=lambda one: one.change, default=None)
    whole = largest is not None and largest.change >= _WHOLE_UPDATE
    evidence = []
    if largest is None and replayed.steps:
        evidence.append(f"lr {replayed.steps[-1].lr:.2g}; the replay made no update")
    elif largest is not None:
        share = f"{largest.change:.2g} times" if largest.change >= 0.1 else f"{largest.change:.1e} of"
        evidence.append(
            f"lr {largest.lr:.2g}; its largest update in the replay, of step {largest.step}, was {share} the weights"
        )
    if case.largest is not None:
        evidence.append(
            f"the largest loss before was {case.largest.loss:.4g} at step {case.largest.step}, and a uniform guess has "
            f"{case.guess:.4g}"
        )
    evidence += _other_rates(case, replayed)
    command = command_with_rate(case.root, case.rate_to_try)
    return NotFiniteCause(
        name="learning rate",
        found=not replayed.loaded_bad and (whole or case.exploded_before or _exploded(case, replayed)),
        evidence="; ".join(evidence) or "no step ran before",
        fix="from a checkpoint before the loss rose, a longer schedule.warmup_steps, optim.clip_norm, or a lower rate: "
        + command,
        command=command,
    )


def _exploded(case: NotFiniteCase, replayed: Replayed) -> bool:
    """Return whether a loss of the replay is far above a uniform guess, of a step before the one that is not finite."""
    own = [one.loss for one in replayed.steps if one.is_finite]
    return bool(own) and max(own) > 2 * case.guess


def _other_rates(case: NotFiniteCase, replayed: Replayed) -> list[str]:
    """Return a phrase if the run used another learning rate than its schedule gives now."""
    rates = {one.step: one.lr for one in replayed.steps}
    for one in case.logged:
        if one.step in rates and not math.isclose(one.lr, rates[one.step]):
            return [f"step {one.step} used lr {one.lr:.3g}, and the schedule now gives {rates[one.step]:.3g}"]
    return []


def zero_vector(case: NotFiniteCase, replayed: Replayed) -> NotFiniteCause:
    origin = replayed.origin
    rows = origin.module_input.zero_rows if origin and origin.module_input else 0
    divisor = _zero_divisor(origin)
    in_norm = origin is not None and "norm" in f"{origin.module} {origin.module_class}".lower()
    found = bool(divisor or (rows and in_norm)) and not replayed.loaded_bad
    if origin is None:
        evidence = "no operation divided by zero"
    elif rows:
        evidence = f"{rows:,} rows of the input of {_place(origin)} are all zeros"
    else:
        evidence = divisor or f"the input of {_place(origin)} has no row of zeros"
    return NotFiniteCause(
        name="norm of a zero vector",
        found=found,
        evidence=evidence + f" (model.norm_eps = {case.run.model.norm_eps:g})" * found,
        fix="add a larger epsilon below the root: model.norm_eps = 1e-5 in a new run, or that of a plug-in. Vectors "
        "of zeros come from an embedding that was never set, or from values below the smallest of the dtype",
    )


def _zero_divisor(origin: NotFiniteOrigin | None) -> str:
    """Return a phrase if the operation divided by zero."""
    if origin is None or origin.kind != "operation":
        return ""
    kind = origin.operation.partition(".")[2]
    inputs = origin.inputs[-1:] if kind.startswith("div") else origin.inputs
    divides = kind.startswith(_DIVISIONS) and any(one.lowest == 0 or one.highest == 0 for one in inputs)
    return f"{origin.operation} in {_place(origin)} got a zero" if divides else ""


def overflow(case: NotFiniteCase, replayed: Replayed) -> NotFiniteCause:
    origin = replayed.origin
    name = "overflow"
    if origin is not None and origin.kind == "tensor" and origin.tensor and not replayed.loaded_bad:
        evidence = f"{origin.tensor} is finite in the checkpoint, but not in {replayed.precision}"
        return NotFiniteCause(name=name, found=True, evidence=evidence, fix=_NARROW)
    if origin is None or origin.kind != "operation":
        return NotFiniteCause(name=name, found=False, evidence="no operation left the range of its dtype", fix=_NARROW)
    kind, limit = origin.operation.partition(".")[2], LARGEST.get(origin.output.dtype, math.inf)
    if any(one in kind for one in _EXPONENTIALS):
        name, limit = "exp overflow", math.log(limit)
    largest = max((one.largest for one in origin.inputs), default=0.0)
    divides = _zero_divisor(origin)
    # A product leaves the range if its inputs are near the root of it. Smaller ones point to a division.
    found = not divides and not replayed.finite_unscaled and largest > (limit if "exp" in name else math.sqrt(limit))
    evidence = (
        f"inputs of {origin.operation} in {_place(origin)} reach {largest:.3g}, and {origin.output.dtype} overflows "
        f"{'in exp ' if 'exp' in name else ''}at {limit:.3g}"
    )
    return NotFiniteCause(name=name, found=found and not replayed.loaded_bad, evidence=evidence, fix=_NARROW)


_NARROW = (
    "bound what grows: model.logit_softcap or model.qk_norm in a new run, or subtract the maximum before an exp of a "
    "plug-in; fp16 overflows at 65,504: train.precision = 'bf16'"
)


def loss_scale(case: NotFiniteCase, replayed: Replayed) -> NotFiniteCause:
    if replayed.loss_scale is None:
        evidence = f"{replayed.precision} has no loss scale"
    elif replayed.finite_unscaled is None:
        evidence = f"the loss itself is not finite, whatever the loss scale ({replayed.loss_scale:g})"
    else:
        also = "also without it" if not replayed.finite_unscaled else "and without it they are finite"
        evidence = f"gradients are not finite with the loss scale {replayed.loss_scale:g}, {also}"
    return NotFiniteCause(
        name="loss scale",
        found=bool(replayed.finite_unscaled),
        evidence=evidence,
        fix="nothing, if it happens now and then: the run skips such a step and halves the scale. Otherwise "
        "train.precision = 'bf16' needs no scale",
    )


def bad_batch(case: NotFiniteCase, replayed: Replayed) -> NotFiniteCause:
    affected, step = len(replayed.samples), replayed.step or replayed.wanted
    some = 0 < affected < replayed.batch
    if some and replayed.phase == "backward" and replayed.origin and not replayed.own_tokens:
        some = False  # only one micro-batch was looked at, and nothing sets its samples apart
    if not affected:
        evidence = "no sample of the batch is known to differ from the others"
    else:
        evidence = f"{affected} of the {replayed.batch} samples of step {step} are known to be affected"
        if replayed.own_tokens:
            evidence += f"; they alone have the token ids {', '.join(map(str, replayed.own_tokens))}"
    return NotFiniteCause(
        name="bad batch",
        found=some,
        evidence=evidence,
        fix=f"look at the documents: ingot data trace --run {case.root} --step {step}, and remove bad ones: ingot data "
        "purge DATA --doc ID. A token that only they have may have weights that were hardly trained",
    )


def huge_gradients(case: NotFiniteCase, replayed: Replayed) -> NotFiniteCause:
    evidence = "the loss or a gradient is not finite itself" if replayed.step else "all gradients are finite"
    if replayed.phase == "gradient norm":
        evidence = "every gradient is finite, but the sum of their squares is not"
    return NotFiniteCause(
        name="huge gradients",
        found=replayed.phase == "gradient norm",
        evidence=evidence,
        fix="lower optim.lr or raise schedule.warmup_steps; optim.clip_norm needs a finite norm, so it does not help",
    )


def optimizer_update(case: NotFiniteCase, replayed: Replayed) -> NotFiniteCause:
    found = replayed.phase == "update"
    evidence = "weights and moments are finite after every update of the replay"
    if found:
        names = ", ".join(one.name for one in replayed.bad_state[:4])
        norm = replayed.steps[-1].grad_norm
        evidence = f"loss and gradient norm ({norm:.3g}) of step {replayed.step} are finite, but not {names} after it"
    elif replayed.loaded_bad:
        evidence = "weights or moments were not finite before any update"
    return NotFiniteCause(
        name="optimizer update",
        found=found,
        evidence=evidence,
        fix="look at callbacks and optimizer of plug-ins ([callbacks], optim.kind), which get gradients after the "
        "check of their norm",
    )


def not_reproduced(case: NotFiniteCase, replayed: Replayed) -> NotFiniteCause:
    first, last = (replayed.steps[0].step, replayed.steps[-1].step) if replayed.steps else (0, 0)
    finite = not replayed.step and not _exploded(case, replayed)
    evidence = "the replay shows it, too"
    if finite and case.healthy:
        evidence = f"log and replay are finite: steps {first} to {last}"
    elif finite:
        evidence = (
            f"steps {first} to {last} are finite in one process, so it was a machine, or code that depends on ranks"
        )
    return NotFiniteCause(
        name="hardware or layout",
        found=finite and not case.healthy,
        evidence=evidence,
        fix="check the machines (ingot doctor --bench on each, ingot doctor DIR --nodes N for all), prove the layout "
        f"(ingot check {case.root} --proof), then continue: ingot train {case.root}",
    )


# In the order in which one explains those after it: weights that are not finite make a batch bad and operations fail.
_DETECTORS: tuple[Callable[[NotFiniteCase, Replayed], NotFiniteCause], ...] = (
    corrupted_load,
    learning_rate,
    zero_vector,
    loss_scale,
    bad_batch,
    huge_gradients,
    overflow,
    optimizer_update,
    not_reproduced,
)


def agreement(case: NotFiniteCase, replayed: Replayed) -> float | None:
    """Return the largest relative difference of a loss or gradient norm between log and replay, over steps that both
    have with finite numbers; None without such a step. 0 means the same bits."""
    logged = {one.step: one for one in case.logged if one.is_finite}
    pairs = [(logged[one.step], one) for one in replayed.steps if one.is_finite and one.step in logged]
    values = [(a.loss, b.loss) for a, b in pairs] + [(a.grad_norm, b.grad_norm) for a, b in pairs]
    return max((abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in values), default=None)


def _place(origin: NotFiniteOrigin) -> str:
    return origin.module or "the step, outside of every module"


def range_text(found: TensorRange) -> str:
    """Return the values of a tensor as text: "float32 [4, 64, 64] from -1.2 to 3.4, 3 NaN, 2 rows of zeros"."""
    counts = ((found.nan, "NaN"), (found.infinite, "infinite"), (found.zero_rows, "rows of zeros"))
    more = "".join(f", {count:,} {word}" for count, word in counts if count)
    values = "no finite element" if found.lowest is None else f"{found.lowest:.3g} to {found.highest:.3g}"
    name = f"{found.name} " if found.name else ""
    return f"{name}{found.dtype} {list(found.shape)}: {values}{more}"

"""The cases of the proof: one form of parallelism, or forms of two, three or four axes.

The rules of the run file (theory/layout.py) decide which combinations are possible.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import combinations, product
from typing import Any

from ingot.schema.arch import Arch, Moe
from ingot.schema.parallel import TWO_STAGES, Parallel
from ingot.schema.run import Data, Optim, RunConfig, Train
from ingot.theory.layout import layout_problems

STEPS, TOKENS, LONG, MICRO_BATCH, SEED = 3, 8, 16, 2, 3
# Clipping acts in every step (reference.py makes sure of it).
OPTIM = Optim(lr=1e-2, weight_decay=0.1, clip_norm=0.1)

# Small and uneven: 20 and 24 rows leave ranks with fewer rows than others, norms and head norms leave some with none.
_TIED = Arch(
    vocab_size=24, d_model=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=6, d_ffn=20, qk_norm=True
)  # fmt: skip
MODELS = {
    "tied": _TIED,
    "untied": replace(_TIED, tied_embeddings=False, qk_norm=False),
    "one kv head": replace(_TIED, num_kv_heads=1),
}
# Between them every rule of routing. idle: more experts than most sequences need, so that some stay without tokens.
# capacity: experts overflow, and what is dropped has to be the same everywhere.
EXPERT_MODELS = {
    "experts": replace(
        _TIED, moe=Moe(num_experts=4, d_expert=12, shared_experts=1, noise=0.3, sequence_loss=0.02, z_loss=0.01)
    ),
    "idle": replace(
        _TIED, moe=Moe(num_experts=8, top_k=1, normalize=False, scores="sigmoid", scale=1.5, d_expert=6, bias_rate=0.01)
    ),
    "capacity": replace(
        _TIED,
        moe=Moe(
            num_experts=8, top_k=2, d_expert=6, groups=4, top_groups=2, capacity_factor=1.0, global_loss=0.05,
            first_dense=1, bias_rate=0.01,
        ),
    ),
    "fallback": replace(
        _TIED, moe=Moe(num_experts=4, top_k=3, d_expert=10, capacity_factor=0.6, overflow="fallback", noise=0.5)
    ),
}  # fmt: skip
OTHER_MODELS = {
    "window": replace(_TIED, sliding_window=5),
    "softcap": replace(_TIED, logit_softcap=0.05),  # near the size of the logits, so that the cap bends them
    "window, one kv head": replace(_TIED, sliding_window=3, num_kv_heads=1),
} | EXPERT_MODELS


@dataclass(frozen=True)
class Form:
    """One form of parallelism. accumulation: it multiplies the micro-batches of a step by this."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    mask_documents: bool = False
    model: str = ""  # of MODELS and OTHER_MODELS; "" leaves the choice to the case
    tokens: int = TOKENS


def _schedule(name: str, pp: int, accumulation: int, **more) -> Form:
    return Form(name, {"pp": pp, "schedule": name, **more}, accumulation)


KINDS = ("alone", "pair", "triple", "four axes")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
AXES: dict[str, tuple[Form, ...]] = {
    "data": (
        Form("ddp", {"dp_replicate": 2, "zero": 1}),
        Form("zero-1", {"dp_shard": 2, "zero": 1}),
        Form("zero-2", {"dp_shard": 2, "zero": 2}, 2),
        Form("zero-3", {"dp_shard": 2, "zero": 3}),
        Form("hsdp-1", {"dp_replicate": 2, "dp_shard": 2, "zero": 1}),
        Form("hsdp-2", {"dp_replicate": 2, "dp_shard": 2, "zero": 2}, 2),
        Form("hsdp-3", {"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
        Form("zero-3 on the host", {"dp_shard": 2, "zero": 3, "offload": "cpu", "offload_parameters": True}),
        Form("canonical", {"dp_replicate": 2, "reduce": "canonical", "virtual_ranks": 4}, 4),
    ),
    "tensor": (Form("tp+sp", {"tp": 2}), Form("tp", {"tp": 2, "sequence": False})),
    "pipeline": tuple(_schedule(name, 2, 4) for name in SCHEDULES),
    "recompute": (Form("recompute", {"recompute": "full"}), Form("selective", {"recompute": "selective"})),
    "offload": (
        Form("offload cpu", {"offload": "cpu"}),
        Form("offload nvme", {"offload": "nvme", "offload_folder": "offload"}),
    ),
    "units": (Form("one unit", {"unit_layers": 0}),),
    "batch": (Form("accumulation", {}, 2), Form("documents", mask_documents=True)),
}


def _variants() -> Iterator[Form]:
    """Forms alone, with their settings and at other degrees."""
    yield Form("one process", {})
    for zero in (1, 2, 3):
        yield Form(f"zero-{zero} over 3", {"dp_shard": 3, "zero": zero}, 2)
        yield Form(f"zero-{zero} over 4", {"dp_shard": 4, "zero": zero}, 2, model="untied")
        for unit_layers, prefetch in product((0, 1, 2), (0, 1, 2)):
            if (unit_layers, prefetch) != (1, 1):
                settings = {"dp_shard": 2, "zero": zero, "unit_layers": unit_layers, "prefetch": prefetch}
                yield Form(f"zero-{zero} units of {unit_layers or 'all'}, {prefetch} ahead", settings, 2)
    for unit_layers in (0, 1, 2):
        settings = {"dp_shard": 2, "zero": 3, "unit_layers": unit_layers, "reshard": False}
        yield Form(f"zero-3 units of {unit_layers or 'all'} that stay", settings, 2)
    yield Form("ddp over 3", {"dp_replicate": 3, "zero": 1}, 2)
    yield Form("ddp over 4, one unit", {"dp_replicate": 4, "zero": 1, "unit_layers": 0}, 2)
    for copies in (1, 4):
        settings = {"dp_replicate": copies, "reduce": "canonical", "virtual_ranks": 4}
        yield Form(f"canonical over {copies}", settings, 8 // copies)
    for tp, sequence, model in product((2, 4), (True, False), MODELS):
        yield Form(f"tp{'+sp' * sequence} over {tp}, {model}", {"tp": tp, "sequence": sequence}, model=model)
    for how in ("full", "selective"):
        yield Form(f"{how} recompute of every 2nd block", {"recompute": how, "recompute_every": 2})
    yield from _pipelines()


def _pipelines() -> Iterator[Form]:
    for name in SCHEDULES:
        yield replace(_schedule(name, 2, 4), name=f"{name} over 2, untied", model="untied")
        accumulation = 8 if name == "dualpipe_v" else 4
        yield replace(_schedule(name, 4, accumulation), name=f"{name} over 4", model="tied")
        uneven = (0, 2, 1, 1) if name in TWO_STAGES else (1, 3)
        yield replace(_schedule(name, 2, 4, stage_layers=uneven), name=f"{name}, uneven stages")
    for name in ("gpipe", "1f1b", "looped_bfs", "zb_h1", "zb_v"):
        yield replace(_schedule(name, 4, 3), name=f"{name}, 3 micro-batches over 4", model="untied")
        yield replace(_schedule(name, 2, 1), name=f"{name}, 1 micro-batch over 2")
    for name in ("interleaved", "looped_bfs", "interleaved_zb"):
        yield replace(_schedule(name, 2, 4, stages_per_rank=3), name=f"{name}, 3 stages on each rank")


@dataclass(frozen=True)
class Case:
    """Hashable by name."""

    name: str
    kind: str  # of KINDS
    model: str
    parallel: Parallel
    accumulation: int
    mask_documents: bool
    tokens: int = TOKENS

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def ranks(self) -> int:
        return self.parallel.world_size

    @property
    def arch(self) -> Arch:
        """The model, with as many layers as the stages need."""
        arch = (MODELS | OTHER_MODELS)[self.model]
        layers = sum(self.parallel.stage_layers) or max(arch.num_layers, self.parallel.stages)
        return replace(arch, num_layers=layers)

    @property
    def global_batch(self) -> int:
        return MICRO_BATCH * self.accumulation * self.parallel.data_ranks

    def one_copy(self) -> "Case":
        """The same steps with dp_replicate = 1: what the copies did side by side comes in turn."""
        copies, parallel = self.parallel.dp_replicate, replace(self.parallel, dp_replicate=1)
        name = f"{self.name}, one copy"
        return replace(self, name=name, parallel=parallel, accumulation=self.accumulation * copies)

    def config(self) -> RunConfig:
        train = Train(
            steps=STEPS,
            seq_len=self.tokens,
            global_batch=self.global_batch,
            micro_batch=MICRO_BATCH,
            precision="fp64",
            device="cpu",
        )
        data = Data(tokens="made in reference.py", mask_documents=self.mask_documents)
        return RunConfig(
            name="proof", seed=SEED, model=self.arch, data=data, train=train, optim=OPTIM, parallel=self.parallel
        )

    def problems(self) -> list[str]:
        return [f"{key}: {message}" for key, message in layout_problems(self.config())]


def compose(*forms: Form, kind: str = "alone", number: int = 0) -> Case:
    """Later forms go before earlier ones where both have the same setting. number: which model, if no form says it."""
    settings: dict[str, Any] = {"unit_layers": 1}  # "auto" would make these small models one unit
    accumulation = 1
    for form in forms:
        settings |= form.settings
        accumulation *= form.accumulation
    wanted = next((form.model for form in forms if form.model), "")
    return Case(
        name=" x ".join(form.name for form in forms),
        kind=kind,
        model=wanted or list(MODELS)[number % len(MODELS)],
        parallel=Parallel(**settings),
        accumulation=accumulation,
        mask_documents=any(form.mask_documents for form in forms),
        tokens=max((form.tokens for form in forms), default=TOKENS),
    )


def _pairs() -> Iterator[tuple[Form, Form]]:
    """Yield pairs of forms of two axes, and canonical sums with each form of data parallelism with other settings."""
    for first, second in combinations(AXES.values(), 2):
        yield from product(first, second)
    *others, canonical = AXES["data"]
    yield from ((form, canonical) for form in others if "dp_shard" in form.settings)


def _pick(axis: str, number: int, leave: tuple[str, ...] = ()) -> Form:
    forms = [form for form in AXES[axis] if form.name not in leave]
    return forms[number % len(forms)]


def _triples() -> Iterator[tuple[Form, ...]]:
    """Every schedule with four forms of data parallelism and either form of tensor parallelism; every schedule and
    every form of data parallelism with tensor parallelism and recompute; offload with the rest in turn."""
    by_name = {form.name: form for form in AXES["data"]}
    for i, schedule in enumerate(AXES["pipeline"]):
        for j, data in enumerate(("ddp", "zero-1", "zero-2", "zero-3")):
            yield by_name[data], _pick("tensor", i + j), schedule
        yield _pick("tensor", i), schedule, _pick("recompute", i // 2)
    for i, data in enumerate(AXES["data"]):
        yield data, _pick("tensor", i), _pick("recompute", i // 2)
        yield data, _pick("pipeline", 3 * i), _pick("offload", i)


def _fours() -> Iterator[tuple[Form, ...]]:
    """pp x dp_replicate x dp_shard x tp on 16 ranks, some with recompute or offload on top."""
    hybrid = [form for form in AXES["data"] if form.name.startswith("hsdp")]
    extras = ((), (AXES["recompute"][0],), (AXES["recompute"][1],), (AXES["offload"][0],))
    for i, schedule in enumerate(AXES["pipeline"]):
        data = hybrid[i % 3]
        if compose(data, schedule).problems():
            data = hybrid[i % 2]
        yield data, _pick("tensor", i), schedule, *extras[i % 4]


_SOFTCAP = Form("softcap", model="softcap")


def _softcaps() -> Iterator[tuple[Form, ...]]:
    """The cap on logits in one process, and with the forms that change how the loss is computed or reduced."""
    yield (_SOFTCAP,)
    for name in ("zero-2", "zero-3", "canonical", "tp+sp", "tp", "1f1b", "zb_v", "accumulation", "documents"):
        yield _SOFTCAP, *_by_name(name)
    yield _SOFTCAP, CONTEXT[0]
    yield _SOFTCAP, *_by_name("tp+sp", "1f1b")


# -- long sequences and experts --


def _context(name: str, cp: int, tokens: int = LONG, **settings) -> Form:
    return Form(name, {"cp": cp, **settings}, tokens=tokens)


CONTEXT = (
    _context("ring", 2, context="ring"),
    _context("striped ring", 2, context="ring", context_layout="striped"),
    _context("contiguous ring", 2, context="ring", context_layout="contiguous"),
    _context("ulysses", 2, context="ulysses"),
    _context("usp", 4, context="usp", ulysses=2),
    _context("ring over 4", 4, context="ring"),
)
EXPERTS = (
    Form("ep", {"dp_shard": 2, "ep": 2, "zero": 1}),
    Form("ep, zero-3", {"dp_shard": 4, "ep": 2, "zero": 3}),
    Form("ep over 4", {"dp_shard": 4, "ep": 4, "zero": 2}, 2),
    Form("ep over tp", {"tp": 2, "ep": 2}),
    Form("ep over cp", {"cp": 2, "ep": 2, "context": "ring"}, tokens=LONG),
)
_WINDOWS = (Form("window", model="window"), Form("narrow window", model="window, one kv head"))


def _by_name(*names: str) -> Iterator[Form]:
    every = {form.name: form for axis in AXES.values() for form in axis}
    yield from (every[name] for name in names)


def _long() -> Iterator[tuple[Form, ...]]:
    """Every form of context parallelism alone, with masks, with fewer key/value heads than ranks, and with one form of
    every other axis; then rings of other lengths."""
    documents = AXES["batch"][1]
    partners = _by_name(
        "ddp", "zero-1", "zero-2", "zero-3", "hsdp-3", "canonical", "tp+sp", "tp", "1f1b", "interleaved", "zb_v",
        "recompute", "selective", "offload cpu", "accumulation", "one unit",
    )  # fmt: skip
    for form in CONTEXT:
        yield (form,)
        yield form, documents
        yield from ((form, window) for window in _WINDOWS)
        yield form, _WINDOWS[0], documents
        yield (replace(form, name=f"{form.name}, one kv head", model="one kv head"),)
    for number, partner in enumerate(partners):
        for form in (CONTEXT[number % len(CONTEXT)], CONTEXT[(number + 3) % len(CONTEXT)]):
            yield form, partner
    for name, tp, pp in (("usp", 2, 1), ("ring", 2, 2), ("ulysses", 2, 2), ("usp", 1, 4)):
        form = next(form for form in CONTEXT if form.name == name)
        inner = Form(f"tp {tp}, pp {pp}", {"tp": tp, "pp": pp}, 4 if pp > 1 else 1)
        yield form, inner, documents
        if pp < 4:
            yield form, inner, Form("zero-1", {"dp_shard": 2, "zero": 1})
    yield CONTEXT[3], *_by_name("gpipe", "documents", "recompute")
    yield (_context("ring over 3", 3, tokens=12, context="ring"),)
    yield (_context("striped ring over 5", 5, tokens=15, context="ring", context_layout="striped"),)
    yield _context("ring over 8", 8, context="ring"), documents
    yield _context("usp of 2 x 4", 8, tokens=32, context="usp", ulysses=4), documents
    yield _context("ulysses over 4", 4, context="ulysses"), documents


def _mixed() -> Iterator[tuple[Form, ...]]:
    """Every model with experts in one process and under every form of expert parallelism; these with one form of every
    other axis; then all axes at once."""
    models = [Form(name, model=name) for name in EXPERT_MODELS]
    documents = AXES["batch"][1]
    partners = _by_name(
        "ddp", "zero-1", "zero-2", "zero-3", "hsdp-1", "hsdp-3", "canonical", "tp+sp", "gpipe", "1f1b", "interleaved",
        "zb_h1", "dualpipe_v", "recompute", "selective", "offload cpu", "accumulation", "one unit", "documents",
    )  # fmt: skip
    for model in models:
        yield (model,)
        for form in (*EXPERTS, *CONTEXT[:5:2]):
            yield model, form
    for number, partner in enumerate(partners):
        yield models[number % 4], partner
        turned = EXPERTS[number % len(EXPERTS) :] + EXPERTS[: number % len(EXPERTS)]
        yield next(
            group
            for group in ((models[(number + 1) % 4], form, partner) for form in turned)
            if not partner.settings.keys() & group[1].settings.keys() and not compose(*group).problems()
        )
    for number, model in enumerate(models):
        axes = {"pp": 2, "tp": 2, "dp_shard": 2, "ep": 4, "zero": 1}
        yield model, Form("pp x zero-1 x ep x tp", axes, 4)
        axes = {"cp": 2, "tp": 2, "dp_shard": 2, "ep": 4, "context": ("ring", "ulysses")[number % 2], "zero": 3}
        yield model, Form("zero-3 x cp x ep x tp", axes, tokens=LONG), documents
        axes = {"pp": 2, "cp": 2, "tp": 2, "ep": 2, "dp_replicate": 2, "context": "ring"}
        yield model, Form("pp x ddp x cp x ep x tp", axes, 2, tokens=LONG)


def _axes(parallel: Parallel) -> int:
    """Return the number of axes larger than 1, plus recompute and offload."""
    degrees = parallel.pp, parallel.data_ranks, parallel.cp, parallel.tp, parallel.ep
    return sum(degree > 1 for degree in degrees) + (parallel.recompute != "none") + (parallel.offload != "none")


@dataclass(frozen=True)
class Refusal:
    """A pair that the rules do not accept, and why."""

    name: str
    rules: tuple[str, ...]


def _order(case: Case) -> tuple[int, int]:
    return case.ranks, KINDS.index(case.kind)


@cache
def all_cases() -> tuple[tuple[Case, ...], tuple[Refusal, ...]]:
    """Every case, few ranks first, and every refused pair; both in the same order each time."""
    forms = [form for axis in AXES.values() for form in axis]
    cases = [compose(form) for form in (*forms, *_variants())]
    refused: list[Refusal] = []
    for number, pair in enumerate(_pairs()):
        case = compose(*pair, kind="pair", number=number)
        if problems := case.problems():
            refused.append(Refusal(case.name, tuple(problems)))
        elif case.parallel != compose(pair[0]).parallel or not pair[1].settings:  # else the first contains the second
            cases.append(case)
    more = [("triple", group) for group in _triples()] + [("four axes", group) for group in _fours()]
    for number, (kind, group) in enumerate(more):
        case = compose(*group, kind=kind, number=number)
        if not case.problems():
            cases.append(case)
    for number, group in enumerate([*_softcaps(), *_long(), *_mixed()]):
        case = compose(*group, number=number)
        case = replace(case, kind=KINDS[min(max(_axes(case.parallel), 1), 4) - 1])
        if problems := case.problems():
            refused.append(Refusal(case.name, tuple(problems)))
        else:
            cases.append(case)
    assert len({case.name for case in cases}) == len(cases)
    return tuple(sorted(cases, key=_order)), tuple(refused)


# Where faults show that show nowhere else in the core (faults.py), and where the matrix once found one.
ALSO_CORE = (
    "canonical over 1", "tp+sp over 4, tied", "hsdp-2 x zb_h1",
    "ring x documents", "ring x window", "ring", "ring over 4", "striped ring", "contiguous ring", "ulysses", "usp",
    "usp x window x documents", "ulysses x gpipe x documents x recompute",
    "ring, one kv head", "idle x ep", "experts x ep", "capacity x ep", "capacity x ring",
    "fallback x ep over cp", "experts x ring", "experts x gpipe", "experts x ddp", "idle x zero-1",
    "experts x ep over tp", "capacity x ep, zero-3", "fallback x zero-3 x cp x ep x tp x documents",
    "capacity x pp x ddp x cp x ep x tp",
    "softcap", "softcap x tp+sp", "softcap x canonical", "softcap x tp+sp x 1f1b", "softcap x ring",
)  # fmt: skip


@cache
def core_cases() -> tuple[Case, ...]:
    """Return every form alone and a sample of the other cases, for each run of the tests."""
    cases, _ = all_cases()
    alone = {form.name for axis in AXES.values() for form in axis}
    chosen = [case for case in cases if case.name in alone]
    for kind, every in (("alone", 16), ("pair", 24), ("triple", 12)):
        group = [case for case in cases if case.kind == kind and case.name not in alone and case.ranks <= 8]
        chosen += group[every // 2 :: every]
    chosen += [case for case in cases if case.name in ALSO_CORE]
    chosen += [next(case for case in cases if case.kind == "four axes")]
    return tuple(sorted(chosen, key=_order))


def case_named(name: str) -> Case:
    return next(case for case in all_cases()[0] if case.name == name)


def settings_text(case: Case) -> str:
    """Return the settings that are not at their defaults: "dp_shard=2 zero=1"."""
    default = asdict(Parallel())
    return " ".join(f"{k}={v}" for k, v in asdict(case.parallel).items() if v != default[k])

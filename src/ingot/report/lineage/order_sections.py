"""The order of samples of a run, step by step: divided wherever a setting of the order changed on the way."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.data.lineage.purge.history import TokenLayout
from ingot.errors import DataError, IngotError
from ingot.report.lineage.exposure import RunTokens
from ingot.schema.quarantine_record import Quarantined
from ingot.trainer.loader.order import KEY as WEIGHTS
from ingot.trainer.loader.order import Order, earlier_values, quarantine_from


@dataclass(frozen=True)
class OrderSection:
    """Steps first..last, which all have the same settings of the order. earlier: the mixtures before, as (last step,
    weights). layout: None if the tokens are no longer known. quarantine: the tokens that the run leaves out.
    continues: epochs continue from the section before."""

    first: int
    last: int
    seed: int
    seq_len: int
    global_batch: int
    weights: Mapping[str, float]
    earlier: Sequence[tuple[int, Mapping[str, float]]]
    layout: TokenLayout | None
    quarantine: Sequence[Quarantined]
    continues: bool

    def order(self) -> Order:
        """Compute the order as the trainer did in these steps. Raises DataError if the tokens are no longer known."""
        if self.layout is None:
            raise DataError(
                "E-PROVE-TOKENS",
                f"the steps {self.first} to {self.last} were trained on other tokens than those in data.tokens now",
                rule="the order of samples is computed from the tokens that the run was trained on",
                fix="restore these tokens in the folder data.tokens, or set data.tokens to their folder",
                step=self.first,
                last_step=self.last,
            )
        mixes = [(last * self.global_batch, own) for last, own in self.earlier]
        left_out = quarantine_from(self.quarantine, self.global_batch)
        return Order(self.layout.manifest, self.seq_len, self.seed, self.weights, earlier=mixes, quarantine=left_out)


def order_sections(run: RunTokens, last_step: int) -> list[OrderSection]:
    """Divide the steps 1 to `last_step` wherever a setting of the order changed."""
    config = run.config
    now = {
        "seed": config.seed,
        "train.seq_len": config.train.seq_len,
        "train.global_batch": config.train.global_batch,
        WEIGHTS: dict(config.data.weights),
    }
    history = {key: [*earlier_values(run.records, key, value), (last_step, value)] for key, value in now.items()}
    ends = {last for values in history.values() for last, _ in values} | {steps.last for steps in run.ranges}
    found: list[OrderSection] = []
    first = 1
    for last in sorted(end for end in ends if 0 < end <= last_step):
        own = {key: next(v for end, v in values if first <= end) for key, values in history.items()}
        section = OrderSection(
            first,
            last,
            own["seed"],
            own["train.seq_len"],
            own["train.global_batch"],
            own[WEIGHTS],
            [(end, weights) for end, weights in history[WEIGHTS][:-1] if end < first],
            run.layout_at(first),
            run.quarantine,
            continues=first == 1,
        )
        if found and identity_of(found[-1]) == identity_of(section):
            section = replace(section, continues=True)
        found.append(section)
        first = last + 1
    return found


def identity_of(section: OrderSection) -> tuple:
    """Return the settings that have to stay equal for epochs to continue."""
    tokens = section.layout and section.layout.manifest.fingerprint()
    return section.seed, section.seq_len, section.global_batch, tokens


class OrderByStep:
    """The order of every step of a run."""

    def __init__(self, run: RunTokens, last_step: int):
        self.sections = order_sections(run, last_step)
        self._at: tuple[OrderSection, Order] | None = None

    def at(self, step: int) -> tuple[OrderSection, Order]:
        """Return the section that `step` is in, and its order. Raises DataError if its tokens are no longer known."""
        if self._at is None or not self._at[0].first <= step <= self._at[0].last:
            section = next(s for s in self.sections if step <= s.last)
            self._at = section, section.order()
        return self._at


def windows_of(root: Path, steps: Sequence[int]) -> dict[int, list[tuple[str, int, int]]]:
    """Return, for each of `steps` of the run folder `root`, its windows in the order of the batch: (shard, first token,
    token after the last). Steps whose tokens are no longer there are left out."""
    try:
        run = RunTokens(root)
    except IngotError:
        return {}
    orders, found = OrderByStep(run, run.config.train.steps), {}
    for step in steps:
        with suppress(DataError, StopIteration):
            section, order = orders.at(step)
            shards, starts = order.locate(order.step(step, section.global_batch))
            names = [order.manifest.shards[number].name for number in shards.tolist()]
            spans = [(start, start + section.seq_len + 1) for start in starts.tolist()]
            found[step] = [(name, *span) for name, span in zip(names, spans, strict=True)]
    return found

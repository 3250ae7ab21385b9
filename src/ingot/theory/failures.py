"""Failures of a job on many nodes: how often the job stops, how often to save, and what share of the time is useful.

    M  mean time to failure of the whole job         R  time from a failure until steps continue, without lost work
    w  time for which a checkpoint pauses the steps  t  time of steps between two checkpoints

Failures are assumed to be independent, at a constant rate (exponential times between failures). All times are in
seconds. Sources: Young 1974 (Communications of the ACM 17, 530); Daly 2006 (Future Generation Computer Systems 22,
303); Kokolis et al. 2025 (arXiv 2410.21680).
"""

import math
from dataclasses import dataclass

from ingot.errors import ConfigError
from ingot.theory.memory import Term
from ingot.units import format_seconds

DAY_SECONDS = 86_400
# The sum of first-order losses is a good approximation only while it is small; above this it is not used.
FIRST_ORDER_LIMIT = 0.5


@dataclass(frozen=True)
class FailureRate:
    """A published rate of failures that stop a job, per node per day. source: the publication and its data."""

    per_node_day: float
    devices_per_node: int
    source: str

    def of_nodes_with(self, devices: int) -> float:
        """Return the rate per day of a node with `devices` devices, in proportion to that number.

        Most failures are failures of devices and of the parts around each device (59-64% are GPUs and their memory in
        Llama 3's table 5).
        """
        return self.per_node_day * devices / self.devices_per_node


PUBLISHED_RATES = {
    "llama3": FailureRate(0.0038, 8, "Llama team 2024, section 3.3.4: 419 in 54 days of 2,048 nodes, H100"),
    "rsc1": FailureRate(0.0065, 8, "Kokolis et al. 2025, RSC-1: 11 months, 16,000 A100"),
    "rsc2": FailureRate(0.0023, 8, "Kokolis et al. 2025, RSC-2: 11 months, 8,000 A100"),
    "opt": FailureRate(0.0156, 8, "Zhang et al. 2022, OPT-175B's logbook: about 2 of 128 nodes a day, A100"),
    "bloom": FailureRate(0.00298, 8, "BigScience's chronicles of 176B: one a week on 48 nodes, A100"),
}

ASSUMED_RATE = PUBLISHED_RATES["llama3"]


def assumed_rate(devices_per_node: int, given: float | None = None) -> Term:
    """Return the failures per node per day, with their source: those that the user gave, or else Llama 3's, in
    proportion to the devices of a node.

    devices_per_node: 0 for a machine without devices, which is assumed to fail as often as a published node.
    """
    if given is not None:
        return Term(given, "as given")
    published = ASSUMED_RATE
    rate = published.of_nodes_with(devices_per_node or published.devices_per_node)
    other = devices_per_node and devices_per_node != published.devices_per_node
    share = f", by {devices_per_node} of {published.devices_per_node} devices" if other else ""
    return Term(rate, f"{published.source}{share}")


def job_mttf_seconds(nodes: int, failures_per_node_day: float) -> float:
    """Return the mean time to failure, in seconds, of a job that stops if any node fails; infinity for a rate of 0."""
    daily = nodes * failures_per_node_day
    return DAY_SECONDS / daily if daily else math.inf


def young_interval(mttf: float, stall: float) -> float:
    """Return the checkpoint interval sqrt(2 w M), which minimizes the lost share w/t + t/2M (Young 1974)."""
    return math.sqrt(2 * stall * mttf)


def daly_interval(mttf: float, stall: float) -> float:
    """Return the best checkpoint interval to higher order (Daly 2006, eq. 37); M if a checkpoint takes 2M or more."""
    if math.isinf(mttf):
        return math.inf
    if stall >= 2 * mttf:
        return mttf
    part = stall / (2 * mttf)
    return young_interval(mttf, stall) * (1 + math.sqrt(part) / 3 + part / 9) - stall


def save_interval(mttf: float, stall: float, least: float, why: str) -> Term:
    """Return the checkpoint interval to use, in seconds of steps: Daly's, or `least` if that is longer.

    least: the shortest possible interval, seconds; why: what takes that long. The formula names all numbers.
    """
    best = daly_interval(mttf, stall)
    rule = f"Daly 2006: w {format_seconds(stall)}, M {format_seconds(mttf)}"
    if best < least:
        return Term(least, f"{why}, {format_seconds(least)}; {rule} would be {format_seconds(best)}")
    return Term(best, f"{rule}: {format_seconds(best)}")


def first_order_overhead(mttf: float, stall: float, interval: float, restart: float = 0.0) -> float:
    """Return w/t + t/2M + R/M: lost time per time of steps. The formula is valid only while losses are small."""
    return stall / interval + interval / (2 * mttf) + restart / mttf


def ettr(mttf: float, stall: float, interval: float, restart: float) -> float:
    """Return the expected effective training time ratio, (1 - (R + t/2)/M) / (1 + w/t), with 1/M = nodes x rate
    (Kokolis et al. 2025).

    The formula is of first order in 1/M. It is negative if a job fails faster than it restarts.
    """
    return (1 - (restart + interval / 2) / mttf) / (1 + stall / interval)


def renewal_ettr(mttf: float, stall: float, interval: float, restart: float) -> float:
    """Return t / (M e^(R/M) (e^((t+w)/M) - 1)): the effective training time ratio without approximation.

    Source: Daly 2006. The denominator is the expected time of a segment that is repeated until it succeeds, if failures
      can also happen during restarts and checkpoints.
    """
    if math.isinf(mttf):
        return interval / (interval + stall)
    exponent = (restart + interval + stall) / mttf
    if exponent > 700:  # e**exponent exceeds a float; the ratio is below 1e-300
        return 0.0
    return interval / (mttf * math.exp(restart / mttf) * math.expm1((interval + stall) / mttf))


def goodput(mttf: float, stall: float, interval: float, restart: float) -> Term:
    """Return the productive share of wall-clock time (renewal_ettr). The formula also has the published approximation.

    The exact form is used for all rates: the approximation reaches 0 while the job still advances, and a switch between
      the two would make goodput rise with the failure rate. Raises ConfigError if the interval is not positive.
    """
    if not interval > 0:
        raise ConfigError(
            "E-CHECKPOINT-INTERVAL",
            f"the time between two checkpoints is {interval} s",
            rule="the time between two checkpoints is above 0",
            fix="set a positive number of seconds or steps between two checkpoints",
            seconds=float(interval),
        )
    exact = renewal_ettr(mttf, stall, interval, restart)
    if math.isinf(mttf):
        return Term(exact, f"no failures: t/(t + w) = {interval:,.0f} / ({interval:,.0f} + {stall:.3g}) = {exact:.1%}")
    lost = first_order_overhead(mttf, stall, interval, restart)
    known = f"M {mttf:,.0f} s, w {stall:.3g} s, t {interval:,.0f} s, R {restart:,.0f} s"
    formula = f"t / (M e^(R/M) (e^((t+w)/M) - 1)), {known} = {exact:.1%}"
    if lost > FIRST_ORDER_LIMIT:
        why = f"losses of w/t + t/2M + R/M = {lost:.0%} are beyond its range"
        return Term(exact, f"{formula}; (1 - (R + t/2)/M) / (1 + w/t) does not hold: {why}")
    near = ettr(mttf, stall, interval, restart)
    return Term(exact, f"{formula}; by (1 - (R + t/2)/M) / (1 + w/t) {near:.1%}")


def poisson_quantile(mean: float, probability: float) -> int:
    """Return the smallest k with P(X <= k) >= probability, for a Poisson distributed X."""
    if mean <= 0:
        return 0
    total, k = math.exp(-mean), 0
    while total < probability and k < mean + 40 * math.sqrt(mean) + 40:
        k += 1
        total += math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
    return k


def spare_nodes(nodes: int, failures_per_node_day: float, repair_days: float, probability: float = 0.99) -> Term:
    """Return how many spare nodes are needed for a failed node to find a replacement with this probability.

    The number of nodes in repair is Poisson distributed with mean nodes x rate x repair time, for any distribution of
    repair times (Palm's theorem).
    """
    mean = nodes * failures_per_node_day * repair_days
    count = poisson_quantile(mean, probability)
    away = f"{nodes:,} nodes x {failures_per_node_day:.3%} a day x {repair_days:g} days = {mean:.2f} in repair"
    return Term(count, f"{away}; {probability:.0%} quantile of Poisson: {count}")

"""The settings of the numbers of a run."""

from dataclasses import dataclass

from ingot.ranges import Steps


@dataclass(frozen=True, kw_only=True)
class MetricSettings:
    """The numbers of every rank and step, in the folder `metrics` of the run (schema/metrics.py).

    record: whether they are written. keep_steps: of how many of the newest steps each has a row; older ones are thinned
      to buckets of 16 rows with mean, least and most, those that are 16 times as old to buckets of 256; 0: all.
    layers_every: the gradient norm and the size of the activations of each layer are measured in steps that are
      multiples of this number; 0: only in a step for which a file RUN/measure-layers asks.
    """

    record: bool = True
    keep_steps: Steps = 100_000
    layers_every: Steps = 0

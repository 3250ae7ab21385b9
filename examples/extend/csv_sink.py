"""A sink that writes chosen numbers to a table for a spreadsheet.

Run file: [sinks.csv], with numbers = ["train/loss", "eval/bpb"]
"""

import csv
from dataclasses import dataclass

from ingot.plugins.sink import SINKS, Sink, SinkPart


@dataclass(frozen=True, kw_only=True)
class Options:
    numbers: tuple[str, ...] = ("train/loss",)


class CsvSink(Sink):
    def __init__(self, place, options):
        self.numbers = options.numbers
        path = place.own / "table.csv"
        is_new = not path.exists()
        self.file = path.open("a", newline="")
        self.table = csv.writer(self.file)
        if is_new:
            self.table.writerow(["attempt", "step", "tokens", *self.numbers])

    def open(self, run_id, attempt, config):
        self.attempt = attempt

    def scalars(self, step, tokens, values):
        if any(name in values for name in self.numbers):
            self.table.writerow([self.attempt, step, tokens, *(values.get(name, "") for name in self.numbers)])
            self.file.flush()  # or a killed process would lose it

    def close(self, deadline):
        self.file.close()


SINKS.register(SinkPart(name="csv", make=CsvSink, settings=Options))

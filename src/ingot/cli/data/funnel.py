"""What several verbs of data print."""

from collections.abc import Sequence

from ingot.cli.terminal import Terminal
from ingot.schema.corpus import FunnelStage


def print_warnings(warnings: Sequence[str], terminal: Terminal) -> None:
    for warning in warnings:
        terminal.say(f"warning: {warning}")


def print_funnel(funnel: Sequence[FunnelStage], terminal: Terminal) -> None:
    from ingot.data.build.stages import funnel_table

    terminal.say(f"{funnel[0].documents_in:,} records")
    header, rows = funnel_table(funnel)
    terminal.table(rows, header, right=(1, 2))

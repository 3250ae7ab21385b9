"""Pipeline schedules as tables of the actions of every rank, in order. The planner simulates them; the trainer executes
them.
"""

from ingot.theory.schedule.build import NAMES, PUBLISHED, Published, build_table, schedule_problems
from ingot.theory.schedule.pairs import Chain, pair_seconds, turns
from ingot.theory.schedule.simulate import Timeline, pipeline_seconds, simulate, timeline_text
from ingot.theory.schedule.table import (
    Action,
    Channel,
    Kind,
    Message,
    ScheduleTable,
    channel_order,
    check_table,
    peak_in_flight,
)

__all__ = [
    "NAMES",
    "PUBLISHED",
    "Action",
    "Chain",
    "Channel",
    "Kind",
    "Message",
    "Published",
    "ScheduleTable",
    "Timeline",
    "build_table",
    "channel_order",
    "check_table",
    "pair_seconds",
    "peak_in_flight",
    "pipeline_seconds",
    "schedule_problems",
    "simulate",
    "timeline_text",
    "turns",
]

"""Pipeline schedules as tables: for every rank, what it does in which order. The planner simulates a table, the trainer
plays the same one."""

from ingot.theory.schedule.build import NAMES, build_table, schedule_problems
from ingot.theory.schedule.check import check_table
from ingot.theory.schedule.program import pipeline_seconds
from ingot.theory.schedule.published import PUBLISHED, Published
from ingot.theory.schedule.simulate import Timeline, simulate
from ingot.theory.schedule.table import Action, Channel, Kind, Message, Table, channel_order, peak_in_flight
from ingot.theory.schedule.text import timeline_text

__all__ = [
    "NAMES",
    "PUBLISHED",
    "Action",
    "Channel",
    "Kind",
    "Message",
    "Published",
    "Table",
    "Timeline",
    "build_table",
    "channel_order",
    "check_table",
    "peak_in_flight",
    "pipeline_seconds",
    "schedule_problems",
    "simulate",
    "timeline_text",
]

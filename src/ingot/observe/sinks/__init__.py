"""Ingot's own sinks, a file each. Their contract is in plugins/sink.py."""

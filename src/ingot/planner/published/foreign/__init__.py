"""Runs of other systems, as somebody published them, said in ingot's own terms: model, layout, hardware, software.

What a source does not say is decided by rules that are written here once, never per row or per source; what could not
be said exactly is noted.
"""

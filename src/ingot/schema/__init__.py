"""The files that data, planner and trainer exchange, as frozen dataclasses: versioned, readable without torch, each
with the hash of its origin.
"""

"""The artifacts on disk between data, planner and trainer: frozen, versioned, readable without torch, each with the
hash of its origin.
"""

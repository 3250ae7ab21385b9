"""Plug-ins: the registries of ingot's open seams, and the contract that every part of a kind fulfils.

Each module has one kind of part: its contract with types, its registry, and ingot's own parts as its first entries.
"""

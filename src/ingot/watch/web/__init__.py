"""The live page of runs."""

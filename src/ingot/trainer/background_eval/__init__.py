"""Evaluation of saves in a process of its own, while the run trains (docs/design/evaluation.md)."""

"""The observers of a run from outside of its ranks: readers of the run folder, in processes of their own. No torch.

The supervisor starts `feed`, which keeps one process per sink (`sink_process`), and `alerts`; `scalars` has the names
of numbers.
"""

"""A run, or several, as they train: the record of a run folder read as it grows, and shown on a page or a terminal."""

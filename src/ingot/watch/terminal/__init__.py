"""`ingot watch RUN` in a terminal: views of a run as text, on a full screen that follows it, or printed once."""

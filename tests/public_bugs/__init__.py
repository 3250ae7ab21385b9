"""Bugs of other trainers that their users reported in public: each as it happens in a few lines of plain torch, then
ingot in the same situation. docs/public_bugs.md lists the reports."""

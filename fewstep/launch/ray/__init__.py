"""Run a recipe on a Ray cluster: one trainer group, or several that take turns on the same places.

The driver (`driver`) reserves places (`cluster`), fills them with trainer groups (`group`, whose
ranks are `trainer`) and rollout workers (`rollouts`), and runs the same training loop as one
process does, through an executor (`executor`) that carries each phase to its group. What one
process hands to another is checked on arrival (`external`).
"""

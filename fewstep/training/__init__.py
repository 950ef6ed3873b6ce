"""The engine: cycles of phases, run by workers, watched by hooks."""

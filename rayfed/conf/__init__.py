"""Typed options of a run and the option files of the methods (no torch, no Ray: checked before either is imported)."""

"""Carrying out a run; knows clients, rounds and processes, never a method by name."""

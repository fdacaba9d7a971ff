"""Searching hyper-parameters: many runs of one federation, each a trial of a Ray Tune experiment."""

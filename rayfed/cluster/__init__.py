"""Clusters: checking their files before a machine starts, the versions they run, and what a job would upload."""

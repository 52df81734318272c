"""Collects and selects trajectories of teachers, on which students are trained."""

"""Trajectories of teachers, and what students are trained on."""

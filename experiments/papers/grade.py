"""GRADE: Tables 1 to 3 and 5 to 16, and Figures 2 to 4."""

from experiments.papers.answers import without_stages
from experiments.papers.printed import tables

_REASON = "no stages make its three domains yet; grade_path has the same stages for one domain"
EXPERIMENTS = [without_stages("grade", name, _REASON) for name in tables("grade")]

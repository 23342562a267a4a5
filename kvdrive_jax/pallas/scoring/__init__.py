"""How well each chunk or cluster fits the queries, from the index as it is stored."""

from kvdrive_jax.pallas.scoring.api import ScoringTuning, score_planes, score_vectors, why_not
from kvdrive_jax.pallas.scoring.reference import Codes, Recipe, Rule

__all__ = [
    "Codes",
    "Recipe",
    "Rule",
    "ScoringTuning",
    "score_planes",
    "score_vectors",
    "why_not",
]

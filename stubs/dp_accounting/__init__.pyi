# The part of dp-accounting 0.6 that privfed.dp uses.
from enum import Enum

class NeighboringRelation(Enum):
    ADD_OR_REMOVE_ONE = 1
    REPLACE_ONE = 2
    REPLACE_SPECIAL = 3

def get_epsilon_gaussian(sigma: float, delta: float, tol: float = ...) -> float: ...
def get_sigma_gaussian(epsilon: float, delta: float, tol: float = ...) -> float: ...

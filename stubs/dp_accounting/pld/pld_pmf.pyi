import numpy as np
from numpy.typing import NDArray

class PLDPmf: ...

def create_pmf_pessimistic_connect_dots_fixed_gap(
    discretization: float, rounded_epsilon_lower: int, rounded_epsilon_upper: int, deltas: NDArray[np.float64]
) -> PLDPmf: ...

from enum import Enum

import numpy as np
from numpy.typing import NDArray

class AdjacencyType(Enum):
    ADD = 1
    REMOVE = 2
    REPLACE = 3

class ConnectDotsBounds:
    epsilon_upper: float
    epsilon_lower: float

class MixtureGaussianPrivacyLoss:
    adjacency_type: AdjacencyType
    sensitivities: NDArray[np.float64]
    _standard_deviation: float
    _variance: float
    _max_sens: float
    _min_sens: float
    _precompute_privacy_loss_constants: NDArray[np.float64]
    def __init__(
        self,
        standard_deviation: float,
        sensitivities: NDArray[np.float64],
        sampling_probs: NDArray[np.float64],
        *,
        adjacency_type: AdjacencyType = ...,
    ) -> None: ...
    def connect_dots_bounds(self) -> ConnectDotsBounds: ...
    def get_delta_for_epsilon(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]: ...
    def inverse_privacy_losses(self, privacy_losses: NDArray[np.float64], precision: float = ...) -> NDArray[np.float64]: ...

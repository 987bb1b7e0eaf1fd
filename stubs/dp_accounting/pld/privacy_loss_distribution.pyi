import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld.pld_pmf import PLDPmf
from numpy.typing import NDArray

class PrivacyLossDistribution:
    def __init__(self, pmf_remove: PLDPmf, pmf_add: PLDPmf | None = ...) -> None: ...
    def compose(self, privacy_loss_distribution: PrivacyLossDistribution) -> PrivacyLossDistribution: ...
    def self_compose(self, num_times: int) -> PrivacyLossDistribution: ...
    def get_epsilon_for_delta(self, delta: float) -> float: ...
    def get_delta_for_epsilon(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]: ...

def from_gaussian_mechanism(
    standard_deviation: float,
    *,
    value_discretization_interval: float = ...,
    sampling_prob: float = ...,
    use_connect_dots: bool = ...,
    neighboring_relation: NeighboringRelation = ...,
) -> PrivacyLossDistribution: ...
def from_truncated_subsampled_gaussian_mechanism(
    *,
    dataset_size: int,
    sampling_probability: float,
    truncated_batch_size: int,
    noise_multiplier: float,
    value_discretization_interval: float = ...,
    use_connect_dots: bool = ...,
    neighboring_relation: NeighboringRelation = ...,
) -> PrivacyLossDistribution: ...

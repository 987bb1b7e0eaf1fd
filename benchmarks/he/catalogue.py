"""What is compared, and what each of it needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An implementation: the type that plays its roles, and the requirement of the environment in which it runs; None for this one."""

    name: str
    module: str
    type_name: str
    libraries: tuple[str, ...]
    requirement: str | None = None


STANDARD, FLARE = "standard", "flare"
THRESHOLD, ESCROW = "threshold-key", "escrow-key"
_OUR_LIBRARIES = ("privfed", "tenseal", "numpy")

CONTENDERS = (
    Contender(name=STANDARD, module="benchmarks.he.ours", type_name="Standard", libraries=_OUR_LIBRARIES),
    Contender(name="compact", module="benchmarks.he.ours", type_name="Compact", libraries=_OUR_LIBRARIES),
    Contender(name="parity", module="benchmarks.he.ours", type_name="Parity", libraries=_OUR_LIBRARIES),
    Contender(name="compatible", module="benchmarks.he.ours", type_name="Compatible", libraries=_OUR_LIBRARIES),
    Contender(name="compatible-tenseal", module="benchmarks.he.tenseal_server", type_name="CompatibleTenseal", libraries=_OUR_LIBRARIES),
    Contender(name=THRESHOLD, module="benchmarks.he.trust_modes", type_name="Threshold", libraries=_OUR_LIBRARIES),
    Contender(name=ESCROW, module="benchmarks.he.trust_modes", type_name="Escrow", libraries=_OUR_LIBRARIES),
    # NVIDIA FLARE pins a TenSEAL that cannot read what ours writes.
    Contender(
        name=FLARE,
        module="benchmarks.he.flare",
        type_name="Flare",
        libraries=("nvflare", "tenseal", "numpy"),
        requirement="nvflare[HE]==2.9.0",
    ),
    Contender(name="tenseal-per-tensor", module="benchmarks.he.tenseal_server", type_name="PerTensor", libraries=("tenseal", "numpy")),
    Contender(
        name="flower-secagg+",
        module="benchmarks.he.flower",
        type_name="SecAggPlus",
        libraries=("flwr", "numpy"),
        requirement="flwr==1.42.0",
    ),
    Contender(name="float32", module="benchmarks.he.plain", type_name="Float32", libraries=("numpy",)),
)
OURS = (STANDARD, "compact", "parity", "compatible")
NAMES = tuple(contender.name for contender in CONTENDERS)


def find(name: str) -> Contender:
    """The contender of that name.

    Raises:
        ValueError: If there is none.
    """
    for contender in CONTENDERS:
        if contender.name == name:
            return contender
    raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")

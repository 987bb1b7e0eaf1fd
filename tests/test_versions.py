"""The versions that are tested are the ends of the ranges that pyproject.toml declares."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins(name: str) -> dict[str, Version]:
    """The versions of a file of constraints."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(package): Version(version) for package, version in pairs}


def lower_bounds(requirements: Iterable[str]) -> dict[str, Version]:
    bounds: dict[str, Version] = {}
    for requirement in map(Requirement, requirements):
        (bound,) = (clause.version for clause in requirement.specifier if clause.operator == ">=")
        bounds[canonicalize_name(requirement.name)] = Version(bound)
    return bounds


def outside(versions: dict[str, Version], requirements: Iterable[str]) -> list[str]:
    """The requirements that a file of constraints does not pin within their range."""
    wanted = [Requirement(requirement) for requirement in requirements]
    return [str(wish) for wish in wanted if (pin := versions.get(canonicalize_name(wish.name))) is None or pin not in wish.specifier]


def test_the_lowest_versions_are_the_lower_bounds_of_the_package_and_of_what_tests_it() -> None:
    assert pins("constraints-lowest.txt") == lower_bounds([*PROJECT["dependencies"], *EXTRAS["dev"]])


def test_extras_that_the_lowest_versions_leave_out_are_engines_and_tools() -> None:
    tested = lower_bounds([*PROJECT["dependencies"], *EXTRAS["dev"]])
    assert {name for name, extra in EXTRAS.items() if not lower_bounds(extra).items() <= tested.items()} == {
        "flare",
        "flower",
        "simulation",
        "fuzz",
        "docs",
    }


def test_the_pinned_versions_are_within_the_declared_ranges() -> None:
    declared = [*PROJECT["dependencies"], *(requirement for extra in EXTRAS.values() for requirement in extra)]
    assert outside(pins("constraints.txt"), declared) == []


def test_a_version_outside_its_range_is_noticed() -> None:
    assert outside({"numpy": Version("1.25"), "torch": Version("2.6")}, ["numpy>=1.26", "torch>=2.6", "rich>=13"]) == [
        "numpy>=1.26",
        "rich>=13",
    ]


def test_a_requirement_without_a_lower_bound_is_noticed() -> None:
    with pytest.raises(ValueError, match="unpack"):
        lower_bounds(["numpy<3"])

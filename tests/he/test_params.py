import dataclasses
import math
import re

import pytest

from privfed.errors import InsufficientCapacityError
from privfed.he import _seal_public
from privfed.he.params import PROFILES, CkksParams, Profile
from privfed.update import Layout


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_profile_is_proven_and_its_amplitude_is_the_largest_that_fits(profile):
    params = CkksParams.from_profile(profile, bound=1.0)
    assert params.noise < 2 ** (params.guard_bits - 1)
    assert 2 * (2**params.guard_bits * params.weight_sum * params.amplitude + math.ceil(params.noise)) < params.modulus
    with pytest.raises(InsufficientCapacityError, match="wraps around"):
        dataclasses.replace(params, amplitude=params.amplitude + 1)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_profile_has_the_fewest_guard_bits_that_hold_its_noise(profile):
    params = CkksParams.from_profile(profile, bound=1.0)
    with pytest.raises(InsufficientCapacityError, match="guard bits"):
        dataclasses.replace(params, guard_bits=params.guard_bits - 1)


def test_standard_profile_has_the_documented_numbers(params):
    assert params.modulus == 2**54 - 172031
    assert (params.poly_modulus_degree, params.word_bytes, params.weight_sum) == (4096, 7, 4096)
    assert (params.guard_bits, params.amplitude) == (18, 2**23 - 1)
    assert (params.fresh_chunk_bytes, params.sum_chunk_bytes) == (4096 * 7 + 64, 2 * 4096 * 7)


def test_one_more_unit_of_weight_does_not_fit_the_standard_profile(params):
    with pytest.raises(InsufficientCapacityError, match="nothing was encrypted"):
        dataclasses.replace(params, weight_sum=params.weight_sum + 1)


def test_noise_counts_encryption_encoding_and_decoding(params):
    # The relative error of a transform is 250 * 2^-53, and 4096 coefficients of size x have the norm 64 x.
    encoding = 250 * 2**-53 * 64 * 2**41
    decoding = 250 * 2**-53 * 64 * 2**53
    assert (encoding, decoding) == (3.90625, 16000.0)
    assert params.noise == pytest.approx(4096 * (21 + 0.5 + encoding) + decoding, rel=1e-6)


def test_hundred_thousand_parameters_cost_at_most_7_4_bytes_each(params):
    layout = Layout(names=("w",), shapes=((100_000,),))
    assert params.chunks(layout) == 25
    assert params.chunks(layout) * params.fresh_chunk_bytes / layout.size <= 7.4


@pytest.mark.parametrize(("size", "chunks"), [(1, 1), (4096, 1), (4097, 2), (8192, 2), (8193, 3)])
def test_a_chunk_holds_4096_coordinates(params, size, chunks):
    assert params.chunks(Layout(names=("w",), shapes=((size,),))) == chunks


def test_any_changed_field_changes_the_digest(params):
    roomy = dataclasses.replace(params, guard_bits=22, amplitude=params.amplitude // 256)
    variants = [
        params,
        roomy,
        dataclasses.replace(roomy, poly_modulus_degree=8192, modulus=_seal_public.prime(8192, 54)),
        dataclasses.replace(roomy, modulus=_seal_public.prime(4096, 55)),
        dataclasses.replace(roomy, weight_sum=roomy.weight_sum - 1),
        dataclasses.replace(roomy, guard_bits=roomy.guard_bits + 1),
        dataclasses.replace(roomy, amplitude=roomy.amplitude - 1),
        dataclasses.replace(roomy, bound=math.nextafter(roomy.bound, 2)),
    ]
    assert len({variant.digest for variant in variants}) == len(variants)
    assert {len(variant.digest) for variant in variants} == {32}


def test_equal_parameters_have_equal_digests(params):
    assert CkksParams.standard(bound=1).digest == params.digest
    assert CkksParams.standard(bound=1) == params


@pytest.mark.parametrize(("function", "other"), [("seal_version", "4.2"), ("tenseal_version", "0.4.0")])
def test_another_minor_version_of_the_library_changes_the_digest(params, monkeypatch, function, other):
    monkeypatch.setattr(_seal_public, function, lambda: other)
    changed = CkksParams.standard()
    assert changed.digest != params.digest
    assert other in changed.versions


def test_versions_are_readable(params):
    assert re.fullmatch(r"SEAL \d+\.\d+, TenSEAL \d+\.\d+\.\d+", params.versions)


@pytest.mark.parametrize("name", ["poly_modulus_degree", "modulus", "weight_sum", "guard_bits", "amplitude"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_that_are_not_positive_ints_are_refused(params, name, value):
    with pytest.raises(ValueError, match=f"expected {name} to be a positive int"):
        dataclasses.replace(params, **{name: value})


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan, 2.0**-257, 2.0**257])
def test_bounds_that_are_not_positive_and_of_moderate_size_are_refused(bound):
    with pytest.raises(ValueError, match="expected bound from"):
        CkksParams.standard(bound=bound)


def test_weight_sums_that_would_let_one_vector_fill_the_modulus_are_refused(params):
    with pytest.raises(ValueError, match="expected weight_sum of at least 4"):
        dataclasses.replace(params, weight_sum=3)


def test_a_modulus_that_seal_does_not_create_is_refused(params):
    with pytest.raises(ValueError, match="expected the modulus"):
        dataclasses.replace(params, modulus=params.modulus - 2)


def test_a_degree_that_seal_does_not_know_is_refused(params):
    with pytest.raises(ValueError, match="expected a ring that SEAL knows"):
        dataclasses.replace(params, poly_modulus_degree=4095)


def test_parameters_below_256_bits_of_security_are_refused(params):
    with pytest.raises(ValueError, match="256 bits of security"):
        dataclasses.replace(params, modulus=_seal_public.prime(4096, 59))


def test_a_profile_without_room_for_a_grid_is_refused():
    with pytest.raises(InsufficientCapacityError, match="leaves no room"):
        CkksParams.from_profile(Profile(name="tiny", poly_modulus_degree=4096, modulus_bits=30, weight_sum=4096), bound=1.0)


def test_solver_returns_the_profile_that_meets_the_tolerance():
    params = CkksParams.for_clients(clients=10, bound=0.5, tolerance=1e-7)
    assert params == CkksParams.standard(bound=0.5)
    assert params.max_error <= 1e-7


def test_solver_says_in_one_sentence_that_the_tolerance_cannot_be_met():
    with pytest.raises(InsufficientCapacityError, match=r"no profile fits: 'standard' has an error of .* above .*nothing was encrypted"):
        CkksParams.for_clients(clients=10, bound=0.5, tolerance=1e-9)


def test_solver_says_in_one_sentence_that_there_are_too_many_clients():
    with pytest.raises(InsufficientCapacityError, match="'standard' has coefficients for 4096 clients, not for 4097"):
        CkksParams.for_clients(clients=4097, bound=0.5, tolerance=1.0)


@pytest.mark.parametrize(("clients", "tolerance"), [(0, 1e-6), (3, 0.0), (3, math.nan)])
def test_solver_refuses_numbers_that_make_no_sense(clients, tolerance):
    with pytest.raises(ValueError, match="expected at least 1 client and a positive tolerance"):
        CkksParams.for_clients(clients=clients, bound=1.0, tolerance=tolerance)

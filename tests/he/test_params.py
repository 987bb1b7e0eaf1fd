import dataclasses
import math
import re
from fractions import Fraction

import pytest

from privfed.errors import InsufficientCapacityError
from privfed.he import _seal_public
from privfed.he.codec import quantise
from privfed.he.params import SEALED_TAGS_BYTES, CkksParams
from privfed.he.product_params import ProductParams
from privfed.he.profiles import COMPATIBLE, PARITY, PROFILES, Profile
from privfed.update import Layout

EVERY = [
    CkksParams.standard(),
    CkksParams.compact(),
    *(CkksParams.parity(clients=clients) for clients in (2, 3, 16, 100)),
    *(CkksParams.compatible(clients=clients) for clients in (2, 16, 100)),
]


def name(params):
    return f"{params.word_bytes} bytes, {params.weight_sum}"


@pytest.mark.parametrize("params", EVERY, ids=name)
def test_every_profile_is_proven_and_its_amplitude_is_the_largest_that_fits_or_shows_anything(params):
    largest = params.amplitude + params.weight_sum // 2 if params.prescaled else params.weight_sum * params.amplitude
    assert params.largest_sum == largest
    assert params.noise < 2 ** (params.guard_bits - 1)
    assert 2 * (2**params.guard_bits * largest + math.ceil(params.noise)) < params.modulus
    if params.amplitude < 2**23 - 1:
        with pytest.raises(InsufficientCapacityError, match="wraps around"):
            dataclasses.replace(params, amplitude=params.amplitude + 1)


@pytest.mark.parametrize("params", EVERY, ids=name)
def test_every_profile_has_the_fewest_guard_bits_that_hold_its_noise(params):
    with pytest.raises(InsufficientCapacityError, match="guard bits"):
        dataclasses.replace(params, guard_bits=params.guard_bits - 1)


@pytest.mark.parametrize("params", [params for params in EVERY if params.prescaled], ids=name)
def test_every_profile_holds_the_sum_of_shares_rounded_the_wrong_way(params):
    for weights in ([1] * params.weight_sum, [params.weight_sum - 1] + [1] * (params.weight_sum - 1), range(1, params.weight_sum + 1)):
        shares = [Fraction(weight, sum(weights)) for weight in weights]
        points = [int(quantise([1.0], params, share)[0][0]) for share in shares if share <= Fraction(1, 2)]
        assert max(points) <= params.largest_point
        assert sum(points) <= params.largest_sum


def test_the_documented_amplitudes_of_the_table():
    assert CkksParams.compact().amplitude == 2**17 - 1
    assert CkksParams.parity(clients=16).amplitude == pytest.approx(2**21, rel=1e-4)
    assert CkksParams.parity(clients=100).amplitude == pytest.approx(2**18, rel=1e-3)
    assert CkksParams.compatible(clients=100).amplitude == 2**23 - 1


@pytest.mark.parametrize(
    ("params", "bytes_up"),
    [
        (CkksParams.parity(clients=10), 4.2),
        (CkksParams.parity(clients=10), 4.02),
        (CkksParams.compact(), 5.02),
        (CkksParams.standard(), 7.02),
        (CkksParams.compatible(clients=10), 16.08),
    ],
)
def test_a_million_parameters_cost_the_documented_bytes_up(params, bytes_up):
    layout = Layout(names=("w",), shapes=((1_000_000,),))
    assert bytes_up - 0.2 < (sum(params.fresh_chunk_sizes(layout)) + SEALED_TAGS_BYTES) / layout.size <= bytes_up


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
    # Where three clients pre-scale, they encode one sum together; and a slot adds up all coefficients' noise.
    small = CkksParams.parity(clients=3)
    transforms = 250 * 2**-53 * 64 * 2**small.guard_bits * (2 * small.largest_sum + 1)
    assert small.noise == pytest.approx(3 * 21.5 + transforms, rel=1e-9)
    slots = CkksParams.compatible(clients=3)
    transforms = 270 * 2**-53 * math.sqrt(8192) * 2**slots.guard_bits * (2 * slots.largest_sum + 1)
    assert slots.noise == pytest.approx(3 * 21.5 * 8192 + transforms, rel=1e-9)


def test_hundred_thousand_parameters_cost_at_most_7_02_bytes_each(params):
    layout = Layout(names=("w",), shapes=((100_000,),))
    assert params.chunks(layout) == 25
    assert sum(params.fresh_chunk_sizes(layout)) / layout.size <= 7.02


SHARED = [CkksParams.standard(), CkksParams.compact(), CkksParams.parity(clients=3)]


@pytest.mark.parametrize("params", SHARED, ids=lambda params: f"{params.word_bytes} bytes")
@pytest.mark.parametrize(("size", "words"), [(1, [1]), (4095, [4095]), (4096, [4096]), (4097, [4096, 1]), (8199, [4096, 4096, 7])])
def test_of_the_last_chunk_only_the_coefficients_in_use_travel(params, size, words):
    layout = Layout(names=("w",), shapes=((size,),))
    assert params.first_polynomial_sizes(layout) == tuple(count * params.word_bytes for count in words)
    assert params.fresh_chunk_sizes(layout) == tuple(count * params.word_bytes + 64 for count in words)
    assert params.sum_chunk_sizes(layout) == tuple((count + 4096) * params.word_bytes for count in words)
    assert len(words) == params.chunks(layout)


@pytest.mark.parametrize(
    "params",
    [CkksParams.compatible(clients=3), CkksParams.escrow(), ProductParams.exact(), ProductParams.escrow()],
    ids=lambda p: f"{p.moduli}",
)
@pytest.mark.parametrize("size", [1, 4097, 8193])
def test_slots_and_what_is_encrypted_to_a_public_key_travel_whole(params, size):
    layout = Layout(names=("w",), shapes=((size,),))
    assert set(params.first_polynomial_sizes(layout)) == {params.polynomial_bytes}
    assert set(params.fresh_chunk_sizes(layout)) == {params.fresh_chunk_bytes}
    assert set(params.sum_chunk_sizes(layout)) == {params.sum_chunk_bytes}
    assert len(params.sum_chunk_sizes(layout)) == params.chunks(layout)


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
        dataclasses.replace(roomy, prescaled=True),
        dataclasses.replace(roomy, seeded_sums=False),
        dataclasses.replace(CkksParams.compatible(clients=3), slots=False),
        CkksParams.compatible(clients=3),
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


@pytest.mark.parametrize("name", ["prescaled", "slots", "seeded_sums"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_flags_that_are_not_flags_are_refused(params, name, value):
    with pytest.raises(ValueError, match=f"expected {name} to be True or False"):
        dataclasses.replace(params, **{name: value})


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan, 2.0**-257, 2.0**257])
def test_bounds_that_are_not_positive_and_of_moderate_size_are_refused(bound):
    with pytest.raises(ValueError, match="expected bound from"):
        CkksParams.standard(bound=bound)


def test_weight_sums_that_would_let_one_vector_fill_the_modulus_are_refused(params):
    with pytest.raises(ValueError, match="expected weight_sum of at least 4"):
        dataclasses.replace(params, weight_sum=3)
    with pytest.raises(ValueError, match="expected weight_sum of at least 2"):
        dataclasses.replace(CkksParams.parity(clients=2), weight_sum=1)


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


@pytest.mark.parametrize("profile", [PARITY, COMPATIBLE], ids=lambda profile: profile.name)
def test_a_profile_in_which_clients_pre_scale_needs_their_number(profile):
    with pytest.raises(ValueError, match=f"expected the number of clients for the profile '{profile.name}'"):
        CkksParams.from_profile(profile, bound=1.0)


def test_sums_of_few_clients_travel_as_seeds_and_those_of_many_whole():
    # A word of 7 bytes takes 5.6e-7 s on a line of 100 Mbit/s, and expanding one takes each client 4e-8 s per upload.
    assert CkksParams.standard().seeded_sums
    assert CkksParams.for_clients(clients=13, bound=1.0, tolerance=1e-7).seeded_sums
    assert not CkksParams.for_clients(clients=14, bound=1.0, tolerance=1e-7).seeded_sums
    assert CkksParams.parity(clients=7).seeded_sums
    assert not CkksParams.parity(clients=8).seeded_sums
    # A TenSEAL server returns both polynomials.
    assert not CkksParams.compatible(clients=2).seeded_sums


def test_only_what_the_server_multiplies_by_depends_on_who_scales():
    assert CkksParams.standard().multipliers([5, 3]) == (5, 3)
    assert CkksParams.parity(clients=2).multipliers([5, 3]) == (1, 1)


def test_the_error_of_a_mean_grows_as_the_share_of_those_who_answered_shrinks():
    params = CkksParams.parity(clients=10)
    assert params.max_error == pytest.approx(5 * params.step, rel=1e-6)
    assert params.mean_error(5, Fraction(1, 2)) == pytest.approx(params.max_error, rel=1e-6)
    assert params.mean_error(5, Fraction(1, 10)) == pytest.approx(25 * params.step, rel=1e-6)


@pytest.mark.parametrize(
    ("clients", "tolerance", "profile"),
    [
        (3, 1e-6, "parity"),
        (3, 1e-7, "standard"),
        (10, 1e-5, "parity"),
        (16, 1e-6, "standard"),
        (100, 1e-3, "parity"),
        (100, 1e-5, "compact"),
        (100, 1e-6, "standard"),
        (200, 5e-6, "compact"),
        (1000, 5e-6, "standard"),
    ],
)
def test_solver_returns_the_cheapest_profile_that_meets_the_tolerance(clients, tolerance, profile):
    params = CkksParams.for_clients(clients=clients, bound=1.0, tolerance=tolerance)
    assert params.modulus.bit_length() == {"parity": 32, "compact": 40, "standard": 54}[profile]
    assert params.max_error <= tolerance
    for cheaper in PROFILES[: [row.name for row in PROFILES].index(profile)]:
        other = CkksParams.from_profile(cheaper, bound=1.0, clients=clients)
        assert other.max_error > tolerance or clients > other.weight_total


def test_profiles_are_listed_cheapest_first():
    assert list(PROFILES) == sorted(PROFILES, key=lambda profile: profile.modulus_bits)


def test_solver_says_in_one_sentence_that_the_tolerance_cannot_be_met():
    with pytest.raises(InsufficientCapacityError, match=r"no profile fits: .*'standard' has an error of .* above .*nothing was encrypted"):
        CkksParams.for_clients(clients=10, bound=0.5, tolerance=1e-9)


def test_solver_says_in_one_sentence_that_there_are_too_many_clients():
    expected = r"no profile fits: 'parity' has no room for 100000 clients; 'compact' has no coefficient for a client with 1/100000 of all"
    with pytest.raises(InsufficientCapacityError, match=expected):
        CkksParams.for_clients(clients=10**5, bound=0.5, tolerance=1e-7)


def test_solver_counts_what_apportioning_the_weights_changes():
    # 0.5, 0.3 and 0.2 are no integers: of 256 or 4096 parts some shares are off by nearly one part, of 2^32 by nothing that shows.
    uneven, whole = [0.5, 0.3, 0.2], [5, 3, 2]
    assert CkksParams.for_clients(clients=3, bound=1.0, tolerance=1e-6, weights=uneven).prescaled
    assert CkksParams.for_clients(clients=3, bound=1.0, tolerance=1e-7, weights=whole) == CkksParams.standard()
    with pytest.raises(InsufficientCapacityError, match="'standard' has an error of 7.32e-04"):
        CkksParams.for_clients(clients=3, bound=1.0, tolerance=1e-7, weights=uneven)


def test_solver_counts_the_error_of_a_mean_of_only_the_smallest_client_that_pre_scales():
    light = CkksParams.parity(clients=3).mean_error(1, Fraction(1, 100))
    weights = [50, 49, 1]
    assert CkksParams.for_clients(clients=3, bound=1.0, tolerance=light * 1.01, weights=weights).modulus.bit_length() == 32
    assert CkksParams.for_clients(clients=3, bound=1.0, tolerance=light * 0.99, weights=weights).modulus.bit_length() == 40


def test_solver_gives_no_client_more_than_half_of_what_is_pre_scaled():
    params = CkksParams.for_clients(clients=3, bound=1.0, tolerance=1e-3, weights=[6, 3, 1])
    assert not params.prescaled
    assert CkksParams.for_clients(clients=3, bound=1.0, tolerance=1e-3, weights=[5, 3, 2]).prescaled
    with pytest.raises(InsufficientCapacityError, match="'parity' takes no client with more than half of all weights"):
        CkksParams.for_clients(clients=3, bound=1.0, tolerance=1e-9, weights=[6, 3, 1])


def test_solver_finds_no_coefficient_for_a_weight_that_would_round_to_nothing():
    params = CkksParams.for_clients(clients=4, bound=1.0, tolerance=1.0, weights=[400, 300, 299, 1])
    assert params.prescaled  # 1/1000 of 2^32
    with pytest.raises(InsufficientCapacityError, match="'compact' has no coefficient for a client with 1/1000 of all weights"):
        CkksParams.for_clients(clients=4, bound=1.0, tolerance=1e-9, weights=[400, 300, 299, 1])


@pytest.mark.parametrize(("clients", "tolerance"), [(0, 1e-6), (1, 1e-6), (3, 0.0), (3, math.nan)])
def test_solver_refuses_numbers_that_make_no_sense(clients, tolerance):
    with pytest.raises(ValueError, match="expected at least 2 clients and a positive tolerance"):
        CkksParams.for_clients(clients=clients, bound=1.0, tolerance=tolerance)


@pytest.mark.parametrize("weights", [[1, 2], [1, 2, 0], [1, 2, -1], [1, 2, math.inf], [1, 2, math.nan]])
def test_solver_refuses_weights_that_make_no_sense(weights):
    with pytest.raises(ValueError, match="expected a positive, finite weight for each of 3 clients"):
        CkksParams.for_clients(clients=3, bound=1.0, tolerance=1e-3, weights=weights)

import copy
import pickle
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import pytest
from numpy.typing import NDArray

from privfed.errors import (
    DecryptionError,
    InvalidMessageError,
    LayoutMismatchError,
    ParametersMismatchError,
    RoundKeyUsedError,
    RoundMismatchError,
    UnsupportedInThisModeError,
)
from privfed.he import _seal_public
from privfed.he._seal_secret import SumKey
from privfed.he.additive import weighted_sum
from privfed.he.codec import evaluate, gather, interpolate
from privfed.he.params import CkksParams
from privfed.he.secret import grid_points
from privfed.he.threshold import OnePolynomialVector, add_up, multiply, public_polynomial, sum_polynomials, uniform_words, unpack_polynomial
from privfed.he.threshold_key import ThresholdKey
from privfed.he.threshold_secret import SummandKey, open_sum, sum_shares
from privfed.update import Layout

BINDING = bytes(range(32))
LAYOUT = Layout(names=("weight",), shapes=((5000,),))


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Clients that have shared their secrets and encrypted one vector each."""

    key: ThresholdKey
    params: CkksParams
    secrets: Sequence[SummandKey]
    shares: Sequence[tuple[bytes, ...]]
    grids: Sequence[NDArray[np.int64]]
    vectors: Sequence[OnePolynomialVector]

    def answers(self, answering: Collection[int], uploaded: Collection[int]) -> dict[int, bytes]:
        return {answer + 1: sum_shares([self.shares[client][answer] for client in uploaded], self.params) for answer in answering}

    def open(self, answering: Collection[int], uploaded: Collection[int], *, quorum: int | None = None) -> NDArray[np.int64]:
        total = add_up([self.vectors[client] for client in uploaded])
        answers = self.answers(answering, uploaded)
        return open_sum(total, BINDING, answers, summands=len(uploaded), quorum=quorum or self.key.quorum)

    def expected(self, uploaded: Collection[int]) -> NDArray[np.int64]:
        return np.sum([self.grids[client] for client in uploaded], axis=0)


def deal(clients: int, corrupted: int, dropouts: int, *, layout: Layout = LAYOUT) -> Dealt:
    key = ThresholdKey(clients=clients, corrupted=corrupted, dropouts=dropouts)
    params = CkksParams.threshold(clients=clients)
    rng = np.random.default_rng(0)
    most = params.amplitude // clients
    grids = [rng.integers(-most, most, layout.size, endpoint=True) for _ in range(clients)]
    for sign, grid in zip((1, -1), grids, strict=False):
        grid[:100] = sign * params.largest_point
    for grid in grids[2:]:
        grid[:100] = 0
    secrets = [SummandKey(params=params, binding=BINDING) for _ in range(clients)]
    return Dealt(
        key=key,
        params=params,
        secrets=secrets,
        shares=[secret.shares(clients=clients, quorum=key.quorum) for secret in secrets],
        grids=grids,
        vectors=[secret.encrypt(grid, layout) for secret, grid in zip(secrets, grids, strict=True)],
    )


@pytest.fixture(scope="module")
def banks() -> Dealt:
    return deal(5, 0, 2)


@pytest.mark.parametrize(("clients", "corrupted", "dropouts"), [(3, 0, 0), (3, 1, 0), (10, 2, 3), (100, 20, 39)])
def test_sums_are_bit_exact_with_every_number_of_dropouts_before_and_after_the_upload(clients: int, corrupted: int, dropouts: int) -> None:
    dealt = deal(clients, corrupted, dropouts)
    for lost in range(dropouts + 1):
        for before in sorted({0, lost // 2, lost}):
            uploaded = range(before, clients)
            answering = list(uploaded)[lost - before :]
            assert np.array_equal(dealt.open(answering, uploaded), dealt.expected(uploaded))


def test_one_answer_less_than_the_quorum_opens_nothing(banks: Dealt) -> None:
    with pytest.raises(ValueError, match="expected at least 3 answers"):
        banks.open((0, 1), range(5))
    with pytest.raises(DecryptionError, match="nobody can tell which"):
        banks.open((0, 1), range(5), quorum=2)
    assert np.array_equal(banks.open((0, 1, 4), range(5)), banks.expected(range(5)))


def test_shares_below_the_quorum_are_uniform_whatever_the_secret() -> None:
    """Of two shares one fixes the polynomial's slope at will: of many secrets, a client's words fill all of the range alike."""
    params = CkksParams.threshold(clients=3)
    shares = [unpack_polynomial(SummandKey(params=params, binding=BINDING).shares(clients=3, quorum=2)[0], params) for _ in range(4)]
    counts = np.histogram(np.concatenate(shares), bins=16, range=(0, params.modulus))[0]
    mean = 4 * params.poly_modulus_degree / 16
    # Chi-square with 15 degrees of freedom: beyond 60 with probability below 3e-7. Ternary words fill two bins, and are far beyond.
    assert ((counts - mean) ** 2 / mean).sum() < 60


def test_answers_for_another_set_than_the_sum_open_nothing_and_blame_nobody(banks: Dealt) -> None:
    total = add_up(banks.vectors[:4])
    answers = banks.answers(range(3), range(5))
    with pytest.raises(DecryptionError, match="one of the clients or the server did not keep to the protocol, and nobody can tell which"):
        open_sum(total, BINDING, answers, summands=4, quorum=3)


def test_an_answer_beyond_the_quorum_that_does_not_fit_the_others_stops_the_opening(banks: Dealt) -> None:
    answers = banks.answers(range(4), range(5))
    total = add_up(banks.vectors)
    assert np.array_equal(open_sum(total, BINDING, answers, summands=5, quorum=3), banks.expected(range(5)))
    with pytest.raises(DecryptionError, match="nothing was opened"):
        open_sum(total, BINDING, answers | {4: answers[3]}, summands=5, quorum=3)


def test_the_sum_of_another_round_is_not_opened(banks: Dealt) -> None:
    with pytest.raises(DecryptionError):
        open_sum(add_up(banks.vectors), bytes(32), banks.answers(range(3), range(5)), summands=5, quorum=3)


def test_a_damaged_polynomial_is_refused(banks: Dealt) -> None:
    answers = banks.answers(range(3), range(5))
    with pytest.raises(InvalidMessageError):
        open_sum(add_up(banks.vectors), BINDING, answers | {1: answers[1][:-1]}, summands=5, quorum=3)
    with pytest.raises(InvalidMessageError):
        sum_polynomials([b"\xff" * banks.params.polynomial_bytes], banks.params)


def test_the_secret_of_a_round_encrypts_once() -> None:
    params = CkksParams.threshold(clients=3)
    secret, grid = SummandKey(params=params, binding=BINDING), np.zeros(LAYOUT.size, np.int64)
    for wrong in (grid[:-1], grid.astype(np.int32), grid + params.largest_point + 1):
        with pytest.raises(ValueError, match="expected"):
            secret.encrypt(wrong, LAYOUT)
    assert not secret.used
    secret.encrypt(grid, LAYOUT)
    assert secret.used
    with pytest.raises(RoundKeyUsedError, match="start a new attempt"):
        secret.encrypt(grid, LAYOUT)


def test_every_attempt_has_a_fresh_secret_and_other_polynomials() -> None:
    params = CkksParams.threshold(clients=3)
    first, second = (SummandKey(params=params, binding=BINDING) for _ in range(2))
    assert not np.array_equal(first._ring_key.words(), second._ring_key.words())
    assert first.binding == BINDING
    polynomials = [public_polynomial(params, binding, chunk) for binding in (BINDING, bytes(32)) for chunk in (0, 1)]
    assert len({polynomial.tobytes() for polynomial in polynomials}) == 4
    with pytest.raises(ValueError, match="expected a binding of 32 bytes"):
        public_polynomial(params, b"short", 0)


def test_a_polynomial_that_meets_the_same_secret_twice_gives_the_difference_away() -> None:
    """The control of `test_the_secret_of_a_round_encrypts_once`: what it prevents, forced."""
    params = CkksParams.threshold(clients=3)
    rng = np.random.default_rng(1)
    grids = rng.integers(-1000, 1000, (2, LAYOUT.size))
    secret = SummandKey(params=params, binding=BINDING)
    vectors = list[OnePolynomialVector]()
    for grid in grids:
        secret._used = False
        vectors.append(secret.encrypt(grid, LAYOUT))
    assert np.array_equal(_read_difference(*vectors), (grids[0] - grids[1])[: params.poly_modulus_degree])
    fresh = SummandKey(params=params, binding=BINDING).encrypt(grids[1], LAYOUT)
    assert np.abs(_read_difference(vectors[0], fresh)).max() > 4000


def _read_difference(one: OnePolynomialVector, other: OnePolynomialVector) -> NDArray[np.int64]:
    """The grid points in the difference of the first chunks, without any key."""
    params = one.params
    words = (unpack_polynomial(one.chunks[0], params) + np.uint64(params.modulus) - unpack_polynomial(other.chunks[0], params)) % np.uint64(
        params.modulus
    )
    return np.rint(_coefficients(words, params) / 2**params.guard_bits).astype(np.int64)


def _coefficients(words: NDArray[np.uint64], params: CkksParams) -> NDArray[np.float64]:
    return interpolate(_ring(params).decode(words))


def _ring(params: CkksParams) -> _seal_public.Ring:
    return _seal_public.ring(params.poly_modulus_degree, params.modulus, slots=False)


def _knapsack(total: NDArray[np.float64], weights: Sequence[int]) -> NDArray[np.int64]:
    """The likeliest ternary summands of every coefficient of a weighted sum, of shape (clients, N): the first of those that fit."""
    table: dict[int, tuple[int, ...]] = {}
    for summands in product((-1, 0, 1), repeat=len(weights)):
        table.setdefault(sum(weight * summand for weight, summand in zip(weights, summands, strict=True)), summands)
    return np.array([table[coefficient] for coefficient in np.rint(total).astype(np.int64).tolist()]).T


def _opens(secret: NDArray[np.int64], vector: OnePolynomialVector, params: CkksParams) -> NDArray[np.int64]:
    """Opens the upload of one client with its secret, of shape (N,)."""
    ring = _ring(params)
    key = SumKey(ring, ring.encode(evaluate(secret.astype(np.float64))))
    decrypted = (
        gather(key.decrypt_unrounded(np.concatenate((unpack_polynomial(chunk, params), public_polynomial(params, BINDING, index)))), params)
        for index, chunk in enumerate(vector.chunks)
    )
    return grid_points(decrypted, vector.layout, params, coefficients=(1,))


def test_the_knapsack_reads_single_secrets_out_of_a_weighted_sum_and_finds_nothing_in_a_plain_one() -> None:
    dealt = deal(3, 0, 0)
    params, modulus = dealt.params, np.uint64(dealt.params.modulus)
    words = [secret._ring_key.words().astype(np.uint64) for secret in dealt.secrets]
    weights = (2000, 1250, 846)  # of 2^12, as a server applies them
    weighted = np.sum([np.uint64(weight) * own % modulus for weight, own in zip(weights, words, strict=True)], axis=0) % modulus
    found = _knapsack(_coefficients(weighted, params), weights)
    for index in range(3):
        assert np.array_equal(_opens(found[index], dealt.vectors[index], params), dealt.grids[index])

    guessed = _knapsack(_coefficients(np.sum(words, axis=0) % modulus, params), (1, 1, 1))
    right = (guessed[0] == found[0]).mean()
    # All triples are equally likely, and the guess is the first with their sum.
    triples = list(product((-1, 0, 1), repeat=3))
    first = {sum(triple): triple for triple in reversed(triples)}
    expected = sum(triple[0] == first[sum(triple)][0] for triple in triples) / len(triples)
    assert expected < 0.6
    assert right == pytest.approx(expected, abs=6 * 0.5 / np.sqrt(params.poly_modulus_degree))
    for index in range(3):
        with pytest.raises(DecryptionError):
            _opens(guessed[index], dealt.vectors[index], params)


def test_the_server_has_no_way_to_weight_what_it_adds(banks: Dealt) -> None:
    with pytest.raises(TypeError, match="is only added up"):
        weighted_sum(banks.vectors, [2] * 5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        add_up(banks.vectors, [2] * 5)  # pyright: ignore[reportCallIssue]


def test_vectors_that_do_not_belong_together_are_not_added(banks: Dealt) -> None:
    vector, params = banks.vectors[0], banks.params
    other = Layout(names=("bias",), shapes=((5000,),))
    zeros = np.zeros(5000, np.int64)
    with pytest.raises(LayoutMismatchError):
        add_up([vector, SummandKey(params=params, binding=BINDING).encrypt(zeros, other)])
    with pytest.raises(RoundMismatchError):
        add_up([vector, SummandKey(params=params, binding=bytes(32)).encrypt(zeros, LAYOUT)])
    with pytest.raises(ParametersMismatchError):
        add_up([vector, SummandKey(params=CkksParams.threshold(clients=6), binding=BINDING).encrypt(zeros, LAYOUT)])
    with pytest.raises(ValueError, match="at least one"):
        add_up([])
    with pytest.raises(ValueError, match="at least one"):
        sum_polynomials([], params)
    with pytest.raises(ValueError, match="at most 5 chunks"):
        sum_polynomials([vector.chunks[0]] * 6, params)
    with pytest.raises(ValueError, match="chunks for this layout"):
        OnePolynomialVector(layout=LAYOUT, params=params, key_id=bytes(16), chunks=vector.chunks[:1])
    with pytest.raises(ValueError, match="key id"):
        OnePolynomialVector(layout=LAYOUT, params=params, key_id=b"", chunks=vector.chunks)


def test_a_secret_of_a_round_cannot_be_printed_copied_or_pickled() -> None:
    secret = SummandKey(params=CkksParams.threshold(clients=3), binding=BINDING)
    assert repr(secret) == "SummandKey(<secret>)"
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="key material"):
            take(secret)


GRID = tuple(product(range(9), repeat=3))


def solved(clients: int, corrupted: int, dropouts: int) -> ThresholdKey | None:
    try:
        return ThresholdKey(clients=clients, corrupted=corrupted, dropouts=dropouts)
    except ValueError:
        return None


def test_a_quorum_is_solved_exactly_where_the_inequality_has_one() -> None:
    """t > (K + c) / 2 and t <= K - f; three clients in every sum, two of them honest. Every number of a grid, and every t."""
    for clients, corrupted, dropouts in product(range(14), repeat=3):
        quorums = [
            quorum
            for quorum in range(clients + 1)
            if quorum > (clients + corrupted) / 2 and quorum <= clients - dropouts and quorum >= 3 and quorum - corrupted >= 2
        ]
        key = solved(clients, corrupted, dropouts)
        assert (key is not None) is bool(quorums), (clients, corrupted, dropouts)
        assert key is None or key.quorum == max(quorums)


def test_a_quorum_that_is_accepted_survives_the_dropouts_and_meets_every_other_one_in_an_honest_client() -> None:
    """By all quorums of up to eight clients, one by one; and what is refused fails in one of these, or would open too little a sum."""
    for clients, corrupted, dropouts in GRID:
        quorum = clients - dropouts
        quorums = [set(members) for members in combinations(range(clients), quorum)] if quorum > 0 else []
        bad = set(range(min(corrupted, clients)))
        meet = all((one & other) - bad for one in quorums for other in quorums)
        enough = quorum >= 3 and all(len(members - bad) >= 2 for members in quorums)
        assert (solved(clients, corrupted, dropouts) is not None) is (bool(quorums) and meet and enough), (clients, corrupted, dropouts)


def test_a_refusal_says_why_and_the_nearest_numbers_that_can_be_solved() -> None:
    reasons = set()
    for clients, corrupted, dropouts in GRID:
        given = {"clients": clients, "corrupted": corrupted, "dropouts": dropouts}
        if solved(**given):
            continue
        with pytest.raises(ValueError, match=r"expected a quorum .* nearest that can be solved: ") as refused:
            ThresholdKey(**given)
        text = str(refused.value)
        assert f"got {clients} clients, {corrupted} corrupted and {dropouts} dropouts" in text
        reasons |= {words for words in ("says too much about each", "of a single client", "in corrupted clients alone") if words in text}
        offered = {name: (int(number), int(quorum)) for name, number, quorum in re.findall(r"(\w+)=(\d+) \(a quorum of (\d+)\)", text)}
        for name, step in (("clients", 1), ("corrupted", -1), ("dropouts", -1)):
            nearest, value = None, given[name]
            while 0 <= value <= 40 and nearest is None:
                nearest = value if solved(**(given | {name: value})) else None
                value += step
            if nearest is None:
                assert name not in offered
            else:
                key = solved(**(given | {name: nearest}))
                assert key is not None
                assert offered[name] == (nearest, key.quorum)
    assert len(reasons) == 3


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((3, 1, 1), r"leave 2 to answer: a sum of fewer than 3 .*: dropouts=0 \(a quorum of 3\), or clients=4 \(a quorum of 3\)"),
        ((3, 2, 0), r"the update of a single client, or nothing; .*: corrupted=1 \(a quorum of 3\), or clients=4 \(a quorum of 4\)"),
        (
            (5, 1, 2),
            r"two quorums of 3 could meet in corrupted clients alone.*: dropouts=1 \(a quorum of 4\), or corrupted=0 \(a quorum of 3\), or "
            r"clients=6 \(a quorum of 4\)",
        ),
        ((0, 4096, 4096), "none with up to 4096 clients"),
    ],
)
def test_refusals_as_they_read(numbers: tuple[int, int, int], words: str) -> None:
    clients, corrupted, dropouts = numbers
    with pytest.raises(ValueError, match=words):
        ThresholdKey(clients=clients, corrupted=corrupted, dropouts=dropouts)


def test_three_banks_of_which_one_is_corrupted_all_answer() -> None:
    dealt = deal(3, 1, 0)
    assert dealt.key.quorum == 3
    assert np.array_equal(dealt.open(range(3), range(3)), dealt.expected(range(3)))
    with pytest.raises(ValueError, match="at least 3 answers"):
        dealt.open((0, 1), range(3))


@pytest.mark.parametrize("wrong", [{"clients": -1}, {"corrupted": True}, {"dropouts": 1.0}, {"clients": 5000}])
def test_numbers_of_clients_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="whole number from 0"):
        ThresholdKey(**({"clients": 5, "corrupted": 0, "dropouts": 0} | wrong))  # pyright: ignore[reportArgumentType]


def test_parameters_with_which_a_server_weights_or_that_hold_too_few_clients_are_refused() -> None:
    key = ThresholdKey(clients=5, corrupted=0, dropouts=0)
    key.check_params(CkksParams.threshold(clients=5))
    for params in (CkksParams.standard(), CkksParams.compatible(clients=5), CkksParams.parity(clients=5)):
        with pytest.raises(UnsupportedInThisModeError, match=r"take CkksParams.threshold\(clients=5\)"):
            key.check_params(params)
    with pytest.raises(UnsupportedInThisModeError, match="hold a sum of 4 clients"):
        key.check_params(CkksParams.threshold(clients=4))


def test_parameters_take_five_bytes_a_parameter_and_the_finest_grid() -> None:
    for clients in (3, 10, 100, 1000):
        params = CkksParams.threshold(clients=clients)
        assert params.polynomial_bytes / params.poly_modulus_degree == 5
        # A thousand clients need 16 guard bits: the grid then is as fine as the room above them, less what the clients round.
        assert params.amplitude >= 2**23 - 1 - clients


def test_words_beyond_the_modulus_are_dropped_and_not_folded_back() -> None:
    params = CkksParams.threshold(clients=3)
    below = np.arange(10, dtype="<u8")
    beyond = np.full(3, params.modulus, "<u8")
    stream = np.concatenate((beyond, below, np.arange(100, dtype="<u8")))
    assert uniform_words(10, params, lambda count: stream.tobytes()[:count]).tolist() == list(range(10))


def test_products_of_words_are_those_of_whole_numbers() -> None:
    params = CkksParams.threshold(clients=3)
    rng = np.random.default_rng(2)
    left, right = rng.integers(0, params.modulus, (2, 1000)).astype(np.uint64)
    left[:2], right[:2] = params.modulus - 1, params.modulus - 1
    expected = [int(one) * int(other) % params.modulus for one, other in zip(left, right, strict=True)]
    assert multiply(left, right, params).tolist() == expected

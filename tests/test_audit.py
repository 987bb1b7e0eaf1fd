import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

import privfed.client
from privfed.attacks.adversary import CLIENT_WITH_SERVER, KEY_HOLDER, OTHER_CLIENT, OUTSIDER, SERVER
from privfed.attacks.analytic import analytic
from privfed.attacks.facts import BinaryLoss, SoftmaxLoss
from privfed.attacks.observation import NotApplicable, Observation, Reconstruction
from privfed.attacks.scoring import interval
from privfed.audit.background import CANDIDATES, Background, LineUp, Pulls
from privfed.audit.canaries import Canaries, transaction_schema
from privfed.audit.example import Example
from privfed.audit.findings import Audit, Finding, Measured, Verdict, strongest
from privfed.audit.rounds import Setting, audited_setting, control_setting, facts
from privfed.audit.run import run_audit
from privfed.audit.suite import DEEPER, SUITE, TOLERANCE, Baseline, LabelAttack, LikelyRows, PickAttack, RowAttack, Score
from privfed.consortium import Consortium, Plaintext
from privfed.data.paysim import NOBAL, PRE, RAW, features, money_of
from privfed.data.transactions import generate_transactions
from privfed.dp.clipping import AdaptiveClipping
from privfed.errors import UnsupportedModelError
from privfed.he.params import CkksParams
from privfed.report.checks import audit_checks
from privfed.report.tables import finding_tone, gain_words
from privfed.report.tone import Tone
from privfed.training.loss import BinaryCrossEntropy, binary_cross_entropy, cross_entropy
from privfed.training.mechanism import DpSgd, NonPrivate
from privfed.training.model import layout_of, mlp
from tests.consortia import COLUMNS, OPEN, PRIVATE, SCHEMA, consortium, network

Make = Callable[..., Consortium]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda **options: consortium(stack, tmp_path_factory.mktemp("ledgers"), **options)


@pytest.fixture(scope="module")
def private_audit(make: Make) -> Audit:
    return run_audit(make(), network(), schema=SCHEMA, repeats=4, rng=np.random.default_rng(0))


@pytest.fixture(scope="module")
def open_audit(make: Make) -> Audit:
    return run_audit(make(training=OPEN), network(), schema=SCHEMA, repeats=2, rng=np.random.default_rng(0))


def measured(finding: Finding | None) -> Measured:
    assert finding is not None
    assert isinstance(finding.outcome, Measured)
    return finding.outcome


def certifying(audit: Audit, party: str, *, control: bool) -> Measured:
    findings = audit.controls if control else audit.audited
    return measured(next(finding for finding in findings if finding.party == party and finding.attack == SUITE[0].name))


def test_parties_without_the_key_have_nothing_to_attack_and_no_score(private_audit: Audit) -> None:
    for party in (SERVER.name, OUTSIDER.name):
        for finding in private_audit.of(party):
            assert isinstance(finding.outcome, NotApplicable)
            assert finding.bytes_seen is not None
            assert finding.bytes_seen > 3 * 7 * layout_of(network()).size  # 3 uploads, 7 bytes for each number
            values = finding.to_json()
            assert values["applicable"] is False
            assert values["score"] is values["advantage"] is values["baseline"] is None


def test_the_same_views_with_the_key_given_certify_rows(private_audit: Audit) -> None:
    for party in (SERVER.name, OUTSIDER.name, CLIENT_WITH_SERVER.name):
        outcome = certifying(private_audit, party, control=True)
        assert outcome.certified >= 2.5
        assert outcome.false_certificates == 0
        assert outcome.advantage > 0.6
    assert private_audit.controls_succeed


def test_the_server_of_a_run_without_encryption_certifies_the_same_rows(private_audit: Audit) -> None:
    given, clear = (
        measured(
            next(f for f in private_audit.controls if f.party == SERVER.name and f.attack == SUITE[0].name and key in f.adversary.name)
        )
        for key in ("given the key", "without encryption")
    )
    assert replace(given, example=None) == replace(clear, example=None)


def test_under_differential_privacy_attacks_stay_near_the_baseline_and_certify_nothing(private_audit: Audit) -> None:
    outcomes = [measured(f) for f in private_audit.audited if not isinstance(f.outcome, NotApplicable) and f.attack != SUITE[2].name]
    assert len(outcomes) == 2 * 3
    assert all(outcome.certified == 0 and outcome.false_certificates == 0 for outcome in outcomes)
    # Twelve cells per batch and four batches: the score's standard error is below 0.5 / sqrt(48) = 0.07, here taken four times.
    assert all(abs(outcome.score.mean - outcome.baseline) < 0.29 for outcome in outcomes)


def test_without_differential_privacy_the_audited_findings_are_the_controls(open_audit: Audit) -> None:
    assert certifying(open_audit, CLIENT_WITH_SERVER.name, control=False).certified >= 2.5
    assert certifying(open_audit, OTHER_CLIENT.name, control=False).advantage > 0.1
    assert all(isinstance(finding.outcome, NotApplicable) for finding in open_audit.of(SERVER.name))


def test_a_claim_of_noise_without_noise_is_found_out(make: Make) -> None:
    silent = replace(PRIVATE, noise_multiplier=1e-6)
    audit = run_audit(make(training=silent, epsilon=1e15), network(), schema=SCHEMA, repeats=2, rng=np.random.default_rng(0))
    outcome = certifying(audit, CLIENT_WITH_SERVER.name, control=False)
    assert outcome.certified >= 2.5
    assert outcome.false_certificates == 0


def test_in_plaintext_mode_the_server_reads_what_it_sums(make: Make) -> None:
    audit = run_audit(make(training=OPEN, keys=Plaintext()), network(), schema=SCHEMA, repeats=2, rng=np.random.default_rng(0))
    assert {finding.party for finding in audit.findings} == {SERVER.name, KEY_HOLDER.name, OTHER_CLIENT.name}
    assert certifying(audit, SERVER.name, control=False).certified >= 2.5
    assert audit.mode == "Plaintext"
    assert "no encryption" in audit.protection


def test_an_audit_spends_no_privacy(make: Make) -> None:
    banks = make()
    run_audit(banks, network(), schema=SCHEMA, repeats=2, attacks=[])
    assert all(client.ledger is not None and not client.ledger.events() for client in banks.clients)


@dataclass(frozen=True, kw_only=True)
class Spy:
    """Runs an attack, remembers what it found, and scores it against whatever it is given."""

    inner: RowAttack
    found: list[bytes] = field(default_factory=list, compare=False)
    name: str = "spy"
    measure: str = "of cells right"

    def run(self, observation: Observation, background: Background) -> Reconstruction | NotApplicable:
        result = self.inner.run(observation, background)
        if isinstance(result, Reconstruction) and observation.training.noise is None:
            self.found.append(result.rows.tobytes() + result.certified.tobytes())
        return result

    def score(self, found: Reconstruction, truth: Canaries, background: Background, rng: np.random.Generator) -> Score:
        return self.inner.score(found, truth, background, rng)


def test_what_attacks_find_is_the_same_when_the_truth_is_replaced_by_garbage(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def garbage(parts: Any) -> Canaries:
        count = sum(len(part) for part in parts)
        return Canaries.draw(SCHEMA, count=count, rng=np.random.default_rng(99))

    banks, spies = make(training=OPEN), (Spy(inner=SUITE[0]), Spy(inner=SUITE[0]))
    audits = []
    for spy, truth in zip(spies, (Canaries.together, garbage), strict=True):
        monkeypatch.setattr(Canaries, "together", truth)
        audits.append(run_audit(banks, network(), schema=SCHEMA, repeats=2, attacks=[spy], rng=np.random.default_rng(5)))
    assert len(spies[0].found) == 2 * (3 + 5 + 1)
    assert spies[0].found == spies[1].found
    honest, misled = (measured(audit.best_control) for audit in audits)
    assert honest.advantage > 0.6
    assert misled.advantage < 0.3
    assert sum(measured(finding).false_certificates for finding in audits[1].findings if finding.control) > 0


def nothing(observation: Observation) -> Reconstruction:
    empty = np.zeros(0)
    rows = np.zeros((0, observation.schema.width))
    return Reconstruction(rows=rows, certified=empty.astype(bool), confidence=empty, certificate="none", seconds=0.0)


def test_an_attack_that_finds_nothing_scores_as_the_baseline(make: Make) -> None:
    attack = RowAttack(name="no operation", read=nothing)
    audit = run_audit(make(training=OPEN), network(), schema=SCHEMA, repeats=2, attacks=[attack])
    for finding in audit.findings:
        outcome = measured(finding)
        assert outcome.score.mean == pytest.approx(outcome.baseline, abs=1e-12)
        assert outcome.advantage == pytest.approx(0.0, abs=1e-12)
        assert outcome.baseline == max(outcome.baselines.values())
    assert not audit.controls_succeed


def test_an_attack_that_does_not_apply_is_never_a_score_and_never_called_safe(make: Make) -> None:
    @dataclass(frozen=True)
    class Never:
        name: str = "never"
        measure: str = "of nothing"

        def run(self, observation: Observation, background: Background) -> NotApplicable:
            return NotApplicable(reason="it never does")

        def score(self, found: object, truth: Canaries, background: Background, rng: np.random.Generator) -> Score:
            raise NotImplementedError

    audit = run_audit(make(training=OPEN), network(), schema=SCHEMA, repeats=2, attacks=[Never()])
    assert audit.best_control is None
    assert not audit.controls_succeed
    for finding in audit.findings:
        assert "safe" not in finding.sentence()
        assert finding.to_json()["reason"]
    assert audit.of(CLIENT_WITH_SERVER.name)[0].sentence() == "not applicable because it never does"


def test_the_audit_is_json_with_every_number_beside_its_baseline(private_audit: Audit) -> None:
    values = json.loads(json.dumps(private_audit.to_json(), allow_nan=False))
    assert len(values["findings"]) == 3 * (5 + 5 + 1)
    for finding in values["findings"]:
        assert {"adversary", "attack", "score", "baseline", "advantage", "interval", "certified", "applicable", "reason"} <= set(finding)
        if finding["applicable"]:
            assert set(finding["baselines"]) == {kind.value for kind in Baseline}
            assert finding["interval"][0] <= finding["score"] <= finding["interval"][1]
            assert finding["repeats"] == 4
    assert set(values["holdings"]) == {party.name for party in (SERVER, OUTSIDER, KEY_HOLDER, OTHER_CLIENT, CLIENT_WITH_SERVER)}


def test_the_strongest_finding_prefers_certified_rows_and_ignores_what_has_no_score(private_audit: Audit, open_audit: Audit) -> None:
    assert strongest(private_audit.of(SERVER.name)) is None
    best = measured(strongest(open_audit.findings))
    assert best.certified == max(measured(f).certified for f in open_audit.findings if not isinstance(f.outcome, NotApplicable))
    control = private_audit.control_of(SERVER.name)
    assert control is not None
    assert control.party == SERVER.name
    undefined = replace(measured(control), advantage=math.nan)
    assert strongest([replace(control, outcome=undefined), control]) is control


# -- attacks that take seconds ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep_audit(make: Make) -> Audit:
    banks = make(keys=Plaintext())  # an audit in the clear sees the same numbers, and takes half the time
    return run_audit(banks, network(), schema=SCHEMA, repeats=2, attacks=DEEPER[len(SUITE) :], rng=np.random.default_rng(0))


def test_deeper_attacks_read_everything_where_nothing_protects_and_certify_nothing_under_noise(deep_audit: Audit) -> None:
    given = {f.attack: measured(f) for f in deep_audit.controls if f.party == SERVER.name}
    together, likeliest, picks = (given[attack.name] for attack in DEEPER[len(SUITE) :])
    assert together.certified == together.rows == 4
    assert together.false_certificates == 0
    assert likeliest.gain.mean > 0.3
    assert picks.score.mean == 1
    assert picks.bound == 1
    for found in deep_audit.audited:
        if isinstance(found.outcome, Measured):
            assert found.outcome.certified == found.outcome.false_certificates == 0


def test_picks_stay_within_what_the_noise_allows_and_are_not_told_as_records_read(deep_audit: Audit) -> None:
    picks = {f.party: f for f in deep_audit.audited if f.picks}
    assert set(picks) == {KEY_HOLDER.name, OTHER_CLIENT.name, SERVER.name}
    # mu is 1 over the noise multiplier, and over the root of the number of clients whose noise is in the sum.
    for party, clients in ((SERVER, 1), (OTHER_CLIENT, 2), (KEY_HOLDER, 3)):
        expected = 1 - norm.cdf(norm.ppf(1 - 1 / CANDIDATES) - 1 / (PRIVATE.noise_multiplier * math.sqrt(clients)))
        assert measured(picks[party.name]).bound == pytest.approx(expected)
        assert not measured(picks[party.name]).breaks_bound
    for finding in picks.values():
        assert not finding.reads_records
        assert "the declared noise allows" in finding.sentence()
        better = replace(finding, outcome=replace(measured(finding), gain=interval([0.5, 0.5, 0.51])))
        assert better.verdict is Verdict.BETTER
        assert gain_words(better) == "no more than the declared noise allows"
        told = replace(deep_audit, findings=(better, *deep_audit.findings))
        assert better not in told.better_than_guessing
        assert told.shown(better.party) is not better
    (check,) = (check for check in audit_checks(deep_audit) if "picks the record" in check.claim)
    assert check.holds is True


def test_more_picks_than_the_declared_noise_allows_are_found_where_the_noise_is_missing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = privfed.client.train

    def silent(*arguments: Any, mechanism: DpSgd | NonPrivate, **options: Any) -> Any:
        missing = replace(mechanism, noise_multiplier=1e-6) if isinstance(mechanism, DpSgd) else mechanism
        return honest(*arguments, mechanism=missing, **options)

    monkeypatch.setattr(privfed.client, "train", silent)
    banks = make(keys=Plaintext())
    audit = run_audit(banks, network(), schema=SCHEMA, repeats=8, attacks=[PickAttack()], rng=np.random.default_rng(0))
    (found,) = audit.of(SERVER.name)
    assert measured(found).breaks_bound
    assert finding_tone(found) is Tone.DANGER
    assert gain_words(found) == "MORE than the declared noise allows"
    assert any(check.holds is False and "picks the record" in check.claim for check in audit_checks(audit))


def test_a_line_up_hides_one_record_among_others_and_knows_all_other_records() -> None:
    truth = Canaries.draw(SCHEMA, count=4, rng=np.random.default_rng(1))
    pool = Canaries.draw(SCHEMA, count=50, rng=np.random.default_rng(2))
    places = set()
    for seed in range(100):
        line_up = LineUp.of(truth, 2, pool=pool, rng=np.random.default_rng(seed))
        (place,) = np.flatnonzero((line_up.candidates.rows == truth.rows[2]).all(axis=1))
        places.add(int(place))
        assert len(line_up.candidates) == CANDIDATES
        assert np.array_equal(line_up.known.rows, truth.rows[[0, 1, 3]])
    assert places == set(range(CANDIDATES))


def test_no_batch_is_begun_once_the_seconds_have_passed_but_two_are_held(make: Make) -> None:
    audit = run_audit(make(training=OPEN, keys=Plaintext()), network(), schema=SCHEMA, repeats=5, seconds=1e-9)
    assert audit.repeats == 2
    assert all(measured(finding).score.repeats == 2 for finding in audit.findings)


# -- settings -----------------------------------------------------------------------------------------------------------------


def test_the_audited_round_keeps_noise_clipping_and_the_step_of_a_record(make: Make) -> None:
    training = audited_setting(make(), rows=4).training
    assert isinstance(training, DpSgd)
    assert (training.noise_multiplier, training.max_grad_norm) == (PRIVATE.noise_multiplier, PRIVATE.max_grad_norm)
    assert training.learning_rate / training.expected_batch_size == pytest.approx(PRIVATE.learning_rate / PRIVATE.expected_batch_size)
    assert training.release_grid == pytest.approx(PRIVATE.release_grid)
    assert (training.sample_rate, training.steps, training.record_limit) == (1.0, 1, 4)


def test_a_round_in_which_a_record_is_sampled_often_is_audited_with_what_its_steps_leave_of_the_noise(make: Make) -> None:
    many = replace(PRIVATE, sample_rate=0.5, steps=64, noise_multiplier=4.0)
    setting = audited_setting(make(training=[replace(PRIVATE, noise_multiplier=1.5), many, PRIVATE]), rows=4)
    assert isinstance(setting.training, DpSgd)
    assert setting.training.noise_multiplier == pytest.approx(1.0)
    several = audited_setting(make(training=[PRIVATE, replace(many, noise_multiplier=3.0), PRIVATE]), rows=4)
    assert isinstance(several.training, DpSgd)
    # 64 steps with a rate of one half add up a record 32 times and the noise 8 times.
    assert several.training.noise_multiplier == pytest.approx(3.0 * 8 / 32)
    assert several.protection == "encrypted, DP-SGD with noise multiplier 0.75 (what 64 steps of a round leave of it)"


def test_the_client_with_the_least_noise_decides_what_is_audited(make: Make) -> None:
    quiet = replace(PRIVATE, noise_multiplier=0.6)
    training = audited_setting(make(training=[PRIVATE, quiet, PRIVATE]), rows=4).training
    assert isinstance(training, DpSgd)
    assert training.noise_multiplier == 0.6
    assert isinstance(audited_setting(make(training=[PRIVATE, OPEN, PRIVATE]), rows=4).training, NonPrivate)


def test_a_step_with_a_fixed_norm_stands_for_one_whose_clipping_adapts_and_for_capped_batches_and_customers(make: Make) -> None:
    clipping = AdaptiveClipping(initial_norm=0.5 * PRIVATE.max_grad_norm, target_quantile=0.5, learning_rate=0.2, count_noise=10.0)
    plain = audited_setting(make(), rows=4).training
    adaptive = audited_setting(make(training=[replace(PRIVATE, adaptive_clipping=clipping)] * 3), rows=4).training
    assert adaptive == replace(plain, max_grad_norm=0.5 * PRIVATE.max_grad_norm)
    for variant in ({"batch_capacity": 1000}, {"records_per_customer": 2}):
        assert audited_setting(make(training=[replace(PRIVATE, **variant)] * 3), rows=4).training == plain


def test_settings_say_what_protects_them() -> None:
    assert Setting(training=PRIVATE, encrypted=True).protection == "encrypted, DP-SGD with noise multiplier 1"
    control = control_setting(CkksParams.standard(bound=0.5), rows=4, encrypted=False)
    assert control.protection == "no encryption, no differential privacy"
    assert control.training.learning_rate == pytest.approx(0.025)


def test_facts_name_the_loss_that_the_clients_minimise() -> None:
    canaries = Canaries.draw(SCHEMA, count=4, rng=np.random.default_rng(0))
    setting = control_setting(CkksParams.standard(), rows=4, encrypted=True)
    losses = {
        binary_cross_entropy: BinaryLoss(),
        BinaryCrossEntropy(positive_weight=7.0): BinaryLoss(positive_weight=7.0),
        cross_entropy: SoftmaxLoss(),
    }
    for loss, expected in losses.items():
        assert facts(setting, network(), loss=loss, canaries=canaries).training.loss == expected
    with pytest.raises(UnsupportedModelError, match="nothing was attacked"):
        facts(setting, network(), loss=lambda outputs, labels: outputs[:, 0] * labels, canaries=canaries)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": transaction_schema(PRE)}, "schema of 7 columns"),
        ({"repeats": 1}, "at least 2 repeats"),
        ({"rows": 0}, "at least 2 repeats and 1 row"),
        ({"seconds": 0.0}, "seconds above 0"),
        ({"attacks": [SUITE[0], SUITE[0]]}, "names of their own"),
    ],
)
def test_an_audit_that_cannot_be_made_is_refused(make: Make, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        run_audit(make(), network(), **({"schema": SCHEMA} | change))


def test_progress_counts_the_repeats(make: Make) -> None:
    done: list[int] = []
    run_audit(make(training=OPEN, keys=Plaintext()), network(), schema=SCHEMA, repeats=3, progress=done.append)
    assert done == [1, 2, 3]


# -- canaries -----------------------------------------------------------------------------------------------------------------


def test_canaries_are_possible_records_of_the_schema_and_differ_in_their_categories() -> None:
    made_up = Canaries.draw(SCHEMA, count=4, rng=np.random.default_rng(1))
    assert (made_up.rows >= SCHEMA.low).all()
    assert (made_up.rows <= SCHEMA.high).all()
    (block,) = SCHEMA.blocks
    assert (made_up.rows[:, block].sum(axis=1) == 1).all()
    assert len({int(row.argmax()) for row in made_up.rows[:, block]}) == 4
    assert np.array_equal(made_up.samples(COLUMNS).features, made_up.rows)


def test_canaries_of_many_batches_are_even_over_categories_and_labels() -> None:
    made_up = Canaries.draw(SCHEMA, count=5000, rng=np.random.default_rng(1))
    (block,) = SCHEMA.blocks
    assert (made_up.rows[:, block].sum(axis=0) == 1000).all()
    assert abs(made_up.labels.mean() - 0.5) < 4 * 0.5 / math.sqrt(5000)
    together = Canaries.together([made_up, made_up])
    assert len(together) == 10_000


@pytest.mark.parametrize("feature_set", [RAW, PRE, NOBAL])
def test_the_transaction_schema_holds_what_the_features_are(feature_set: Any) -> None:
    schema = transaction_schema(feature_set)
    table = features(generate_transactions(rows=500, fraud_rate=0.1, rng=np.random.default_rng(0)), feature_set)
    assert schema.width == len(table.columns)
    assert (table.features >= schema.low - 1e-6).all()
    assert (table.features <= schema.high + 1e-6).all()
    (block,) = schema.blocks
    assert (table.features[:, block].sum(axis=1) == 1).all()


# -- scoring of the suite -----------------------------------------------------------------------------------------------------


def background() -> Background:
    return Background(pool=Canaries.draw(SCHEMA, count=500, rng=np.random.default_rng(7)), module=network(), pulls=None)


def test_a_perfect_reading_scores_one_and_its_example_is_all_right() -> None:
    truth = Canaries.draw(SCHEMA, count=3, rng=np.random.default_rng(2))
    found = Reconstruction(
        rows=truth.rows[::-1], certified=np.array([True, False, False]), confidence=np.ones(3), certificate="", seconds=0.0
    )
    score = RowAttack(name="perfect", read=analytic).score(found, truth, background(), np.random.default_rng(0))
    assert score.value == dict.fromkeys(Baseline, 1.0)
    assert (score.certified, score.false) == (1, 0)
    assert score.example is not None
    assert score.example.truth == score.example.said
    assert all(all(row) for row in score.example.right)
    assert score.example.certified == (False, False, True)
    assert not any(score.example.guessed)


def test_an_example_keeps_the_order_of_the_columns_and_marks_what_is_wrong() -> None:
    truth = Canaries.draw(SCHEMA, count=1, rng=np.random.default_rng(2))
    wrong = truth.rows.copy()
    wrong[0, -1] = -wrong[0, -1]  # the hour, behind the one-hot block
    found = Reconstruction(rows=wrong, certified=np.array([False]), confidence=np.ones(1), certificate="", seconds=0.0)
    example = RowAttack(name="one wrong", read=analytic).score(found, truth, background(), np.random.default_rng(0)).example
    assert example is not None
    assert example.columns == ("amount", "kind", "hour")
    assert example.right == ((True, True, False),)
    assert example.truth[0][1] in ("cash", "card", "wire", "cheque", "coin")


def test_the_label_count_is_right_or_wrong() -> None:
    attack, made_up = LabelAttack(), background()
    truth = Canaries.draw(SCHEMA, count=4, rng=np.random.default_rng(3))
    for count in range(5):
        score = attack.score(count, truth, made_up, np.random.default_rng(0))
        assert score.value[Baseline.MEAN] == float(count == truth.labels.sum())
        assert 0 <= score.baseline[Baseline.MARGINAL] <= 1


@pytest.mark.parametrize(("noise_multiplier", "exact"), [(1e-3, True), (100.0, False)])
def test_labels_are_counted_under_clipping_and_where_noise_hides_them_the_most_frequent_number_is_said(
    make: Make, noise_multiplier: float, exact: bool
) -> None:
    training = replace(PRIVATE, noise_multiplier=noise_multiplier)
    banks = make(training=training, epsilon=1e15, loss=BinaryCrossEntropy(positive_weight=20.0))
    audit = run_audit(banks, network(), schema=SCHEMA, repeats=5, attacks=[LabelAttack()], rng=np.random.default_rng(4))
    (finding,) = audit.of(CLIENT_WITH_SERVER.name)
    outcome = measured(finding)
    # Half of the pool is positive, so that of four records two are positive most often.
    assert outcome.score.mean == (1.0 if exact else outcome.baselines[Baseline.MEAN])
    assert outcome.baselines[Baseline.MEAN] < 1.0


def test_pulls_are_gradients_of_single_records_cut_down_to_the_norm() -> None:
    made_up = Canaries.draw(SCHEMA, count=30, rng=np.random.default_rng(7))
    pulls = Pulls.of(network(), loss=BinaryCrossEntropy(positive_weight=20.0), pool=made_up)
    assert pulls is not None
    assert pulls.bias.shape == pulls.norm.shape == (2, 30)
    assert (pulls.bias[0] > 0).all()
    assert np.allclose(pulls.bias[1], -20.0 * (1.0 - pulls.bias[0]), rtol=1e-5)
    assert (pulls.norm >= np.abs(pulls.bias)).all()
    mean, variance = pulls.moments(math.inf)
    assert mean == pytest.approx(pulls.bias.mean(axis=1))
    assert variance == pytest.approx(pulls.bias.var(axis=1))
    clipped, _ = pulls.moments(0.01)
    assert (np.abs(clipped) <= 0.01).all()
    assert clipped == pytest.approx((0.01 * pulls.bias / pulls.norm).mean(axis=1))


def test_labels_of_a_model_with_several_outputs_are_not_counted() -> None:
    model = mlp(SCHEMA.width, hidden=(8,), outputs=2)
    assert Pulls.of(model, loss=cross_entropy, pool=Canaries.draw(SCHEMA, count=3, rng=np.random.default_rng(0))) is None


def test_labels_are_counted_exactly_where_nothing_hides_them(private_audit: Audit) -> None:
    counts = [measured(finding) for finding in private_audit.controls if finding.attack == LabelAttack().name]
    assert len(counts) == 6
    assert all(outcome.score.mean == 1.0 for outcome in counts)


# -- compared with guessing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "certified", "expected"),
    [
        (1e-9, 0.1, 0.0, Verdict.BETTER),
        (0.0, 0.1 + 1e-9, 0.0, Verdict.UNDECIDED),
        (-1.0, 1.0, 0.0, Verdict.UNDECIDED),
        (-0.3, 0.1, 0.0, Verdict.NO_BETTER),
        (0.0, 0.0, 0.0, Verdict.NO_BETTER),
        (-0.3, -1e-9, 0.0, Verdict.WORSE),
        (-0.3, -0.1, 0.25, Verdict.BETTER),
    ],
)
def test_the_verdict_follows_from_the_interval_of_the_gain_and_from_certificates(
    private_audit: Audit, low: float, high: float, certified: float, expected: Verdict
) -> None:
    finding = private_audit.shown(CLIENT_WITH_SERVER.name)
    # One of four records in every second batch, beyond the fifth that guessing has right, is a gain of 0.8 / 8.
    outcome = replace(measured(finding), baseline=0.2, rows=4)
    assert outcome.telling == pytest.approx(0.1, rel=1e-12)
    changed = replace(finding, outcome=replace(outcome, gain=replace(outcome.gain, low=low, high=high, repeats=20), certified=certified))
    assert changed.verdict is expected
    assert changed.reads_records is (expected is Verdict.BETTER)
    assert changed.to_json()["verdict"] == expected.value
    counts = replace(changed, outcome=replace(measured(changed), example=None))
    assert not counts.reads_records
    assert private_audit.of(SERVER.name)[0].verdict is None


@pytest.mark.parametrize(("repeats", "expected"), [(2, Verdict.UNDECIDED), (5, Verdict.UNDECIDED), (6, Verdict.NO_BETTER)])
def test_batches_that_all_gave_the_same_exclude_a_gain_only_if_they_would_have_shown_it(
    private_audit: Audit, repeats: int, expected: Verdict
) -> None:
    outcome = measured(private_audit.shown(CLIENT_WITH_SERVER.name))
    silent = replace(outcome, gain=interval([0.0] * repeats), certified=0.0)
    # A record that is read in every second batch is read in none of five once in 32 times, and in none of six once in 64.
    assert silent.verdict is expected


def test_the_highest_gain_covers_attacks_that_rarely_read_a_whole_batch(private_audit: Audit) -> None:
    outcome, rng, batches = replace(measured(private_audit.shown(CLIENT_WITH_SERVER.name)), baseline=0.4), np.random.default_rng(0), 16
    for often in (0.02, 0.1, 0.17, 0.5):
        gains = 0.6 * (rng.random((2000, batches)) < often)
        highest = [replace(outcome, gain=interval(list(row))).highest_gain for row in gains]
        narrow = [interval(list(row)).high for row in gains]
        # 5 % are too low at most; 0.075 is five standard errors more.
        assert np.mean(np.array(highest) < 0.6 * often) < 0.075
        if often <= 0.1:
            assert np.mean(np.array(narrow) < 0.6 * often) > 0.15


def test_a_gain_that_would_matter_is_that_of_an_attack_that_reads_a_record_in_every_second_batch(private_audit: Audit) -> None:
    outcome = measured(private_audit.shown(CLIENT_WITH_SERVER.name))
    batches = 1000
    guessed = np.full(outcome.rows * batches, outcome.baseline)
    read = guessed.copy()
    read[:: 2 * outcome.rows] = 1.0
    assert outcome.telling == pytest.approx(read.mean() - guessed.mean())


def test_the_gain_is_the_mean_difference_from_the_stronger_baseline(private_audit: Audit) -> None:
    for finding in private_audit.findings:
        if isinstance(outcome := finding.outcome, Measured):
            assert outcome.gain.mean == pytest.approx(outcome.score.mean - outcome.baseline)
            assert outcome.baseline == max(outcome.baselines.values())


def test_the_risk_is_shared_out_among_the_audited_comparisons(private_audit: Audit) -> None:
    audited = [measured(finding) for finding in private_audit.audited if finding.verdict]
    assert len(audited) == 9
    assert {outcome.gain.level for outcome in audited} == {1 - 0.05 / 9}
    assert {measured(finding).gain.level for finding in private_audit.controls} == {0.95}


def test_audits_of_guessers_rarely_say_that_one_is_better() -> None:
    """600 audits of nine guessers: a family-wise error of 2.5 % on this side is 15 of them, and 35 are five standard errors more."""
    rng = np.random.default_rng(6)
    alarms, careless = 0, 0
    for _ in range(600):
        gains = rng.normal(scale=0.05, size=(9, 8))
        alarms += any(interval(list(gain), level=1 - 0.05 / 9).low > 0 for gain in gains)
        careless += any(interval(list(gain), level=0.95).low > 0 for gain in gains)
    assert alarms <= 35 < careless


def test_a_party_is_shown_by_what_it_read_even_if_that_is_no_record(private_audit: Audit) -> None:
    counting = next(f for f in private_audit.of(CLIENT_WITH_SERVER.name) if f.attack == SUITE[2].name)
    outcome = measured(counting)
    better = replace(counting, outcome=replace(outcome, gain=replace(outcome.gain, low=0.1, high=0.4)))
    findings = tuple(better if finding is counting else finding for finding in private_audit.findings)
    audit = replace(private_audit, findings=findings)
    assert audit.shown(CLIENT_WITH_SERVER.name) is better
    assert better in audit.better_than_guessing
    assert strongest(audit.of(CLIENT_WITH_SERVER.name)) is not better


def test_false_certificates_are_told(private_audit: Audit) -> None:
    control = private_audit.control_of(SERVER.name)
    assert control is not None
    assert "false" not in control.sentence()
    wrong = replace(control, outcome=replace(measured(control), false_certificates=2))
    assert wrong.sentence().endswith("; 2 certificates were false")


# -- what is shown of records -------------------------------------------------------------------------------------------------


def test_money_and_hours_are_shown_as_people_read_them() -> None:
    schema = transaction_schema(PRE)
    made_up = Canaries.draw(schema, count=40, rng=np.random.default_rng(0))
    found = Reconstruction(rows=made_up.rows, certified=np.zeros(40, dtype=np.bool_), confidence=np.ones(40), certificate="", seconds=0.0)
    example = Example.of(found, made_up, made_up.rows, tolerance=TOLERANCE)
    assert example.columns == ("type", "hour", "amount", "oldbalanceOrg", "oldbalanceDest")
    hours = [row[1] for row in example.truth]
    assert all(re.fullmatch(r"([01]\d|2[0-3]):00", hour) for hour in hours)
    assert len(set(hours)) > 10
    for row, texts in zip(made_up.rows, example.truth, strict=True):
        angle = int(texts[1][:2]) * math.tau / 24
        assert row[-5:-3] == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)
        amount = money_of(row[-3])
        assert texts[2] == (f"{amount:,.2f}" if amount < 100 else f"{amount:,.0f}")
    assert all(all(row) for row in example.right)


def test_an_hour_is_right_if_its_sine_and_its_cosine_are_and_money_stays_in_its_range() -> None:
    schema = transaction_schema(NOBAL)
    truth = Canaries.draw(schema, count=1, rng=np.random.default_rng(1))
    said = truth.rows.copy()
    said[0, -2] += 0.5
    said[0, -1] = 50.0
    found = Reconstruction(rows=said, certified=np.array([False]), confidence=np.ones(1), certificate="", seconds=0.0)
    example = Example.of(found, truth, truth.rows, tolerance=TOLERANCE)
    assert example.right == ((True, False, False),)
    assert example.said[0][2] == "1,000,000,000"


def test_the_likeliest_rows_are_never_told_worse_than_a_guess_and_are_told_where_nothing_hides_them(tmp_path: Path) -> None:
    """Where the prior decides more than the update, the likeliest rows fit noise: of such rows the attack says nothing."""
    with ExitStack() as stack:
        found = run_audit(
            consortium(stack, tmp_path), network(), schema=SCHEMA, repeats=2, attacks=(LikelyRows(),), rng=np.random.default_rng(0)
        )
    audited = [finding.outcome for finding in found.audited if isinstance(finding.outcome, Measured)]
    assert len(audited) == 3
    for outcome in audited:
        assert outcome.score.mean >= outcome.baseline - 0.05
    assert found.controls_succeed

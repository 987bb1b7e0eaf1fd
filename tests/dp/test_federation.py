import json
import math
from dataclasses import replace

import pytest

from privfed.dp.federation import FederationStatement, merge
from privfed.dp.mechanism import GaussianRelease, NonPrivateRelease, PoissonSampledGaussian, Relation
from privfed.dp.silo import SiloNoise
from privfed.dp.silo_promise import SiloPromise
from privfed.dp.statement import PrivacyStatement
from privfed.strict_json import checksum

NOISE = SiloNoise(weights=dict.fromkeys("abc", 1), clip_steps=32, noise_multiplier=6.0, coordinates=1000)


def statement(name: str, noise_multiplier: float, *, delta: float = 1e-6, silo: bool = False, **more: object) -> PrivacyStatement:
    event = PoissonSampledGaussian(noise_multiplier=noise_multiplier, sample_rate=0.01, steps=200)
    promise = SiloPromise.of([NOISE.event()] * int(2 * noise_multiplier), delta=1e-6, noise=NOISE) if silo else None
    return PrivacyStatement.of([event], population=name, delta=delta, max_grad_norm=1.0, silo=promise, **more)  # type: ignore[arg-type]


BANKS = (statement("bank_a", 1.0), statement("bank_b", 2.0, delta=1e-5), statement("bank_c", 4.0))
FEDERATION = FederationStatement(mode="SharedKey", statements=BANKS)


def test_the_worst_client_is_what_is_claimed_about_all_and_nothing_is_averaged() -> None:
    assert FEDERATION.worst is BANKS[0]
    for who, claim in FEDERATION.claims().items():
        assert claim == f"at worst, at bank_a: {BANKS[0].claims()[who]}"
    mean = sum(bank.epsilon for bank in BANKS) / 3
    assert f"{mean:.3g}" not in FEDERATION.text()


def test_somebody_at_several_clients_adds_up_epsilons_and_deltas() -> None:
    promise = FEDERATION.person_at(["bank_a", "bank_b"])
    assert promise.populations == ("bank_a", "bank_b")
    assert promise.epsilon == BANKS[0].epsilon + BANKS[1].epsilon
    assert promise.delta == pytest.approx(1.1e-5)
    everywhere = merge(BANKS)
    assert everywhere.epsilon == pytest.approx(sum(bank.epsilon for bank in BANKS))
    assert everywhere.words in FEDERATION.text()
    assert f"epsilon {everywhere.epsilon:.3g} at delta 1.2e-05, for one record at each" == everywhere.words


def test_promises_that_add_up_to_nothing_say_so() -> None:
    large = [statement(f"bank_{number}", 1.0, delta=0.5) for number in range(2)]
    noiseless = PrivacyStatement.of([NonPrivateRelease()], population="bank_x", delta=1e-6, max_grad_norm=None)
    for statements in (large, [*BANKS, noiseless]):
        assert merge(statements).words == "nothing is promised"
    assert merge([*BANKS, noiseless]).epsilon == math.inf


def test_a_federation_with_a_client_that_is_not_private_is_not_private() -> None:
    noiseless = PrivacyStatement.of([NonPrivateRelease()], population="bank_x", delta=1e-6, max_grad_norm=None)
    federation = FederationStatement(mode="SharedKey", statements=(*BANKS, noiseless))
    assert not federation.private
    assert all("nothing is promised" in claim for claim in federation.claims().values())
    assert "bank_x: NOT PRIVATE" in federation.text()
    assert FederationStatement.from_json(federation.to_json()) == federation
    assert json.loads(federation.to_json())["private"] is False


def test_a_federation_statement_recomputes_every_client_from_its_json_alone() -> None:
    restored = FederationStatement.from_json(FEDERATION.to_json())
    assert restored == FEDERATION
    assert [bank.recompute() for bank in restored.statements] == [bank.epsilon for bank in BANKS]
    assert restored.private


def test_the_text_names_every_client_and_holds_every_statement() -> None:
    text = FEDERATION.text()
    assert text.startswith("Privacy statement for 3 clients; key: SharedKey")
    for bank in BANKS:
        assert f"{bank.population}: epsilon {bank.epsilon:.3g} at delta {bank.delta:g} per record" in text
        assert bank.text() in text
    assert "A record at one client has that client's promise" in text
    assert "At all of them" not in FederationStatement(mode="m", statements=BANKS[:1]).text()


def test_silos_are_claimed_where_every_client_promises_it_and_at_the_worst() -> None:
    silos = tuple(statement(f"bank_{number}", noise, silo=True) for number, noise in enumerate((1.0, 3.0, 2.0)))
    claims = FederationStatement(mode="SharedKey", statements=silos).claims()
    about = {who: claim for who, claim in claims.items() if who.endswith("about a silo as a whole")}
    assert len(about) == 6
    worst = silos[1].silo
    assert worst is not None
    assert about["the server, about a silo as a whole"] == f"at worst, at bank_1: {worst.claims()['the server']}"
    mixed = FederationStatement(mode="SharedKey", statements=(*silos[:2], BANKS[0]))
    assert not [who for who in mixed.claims() if "silo" in who]


@pytest.mark.parametrize(
    "statements",
    [(), (BANKS[0], replace(BANKS[1], population="bank_a")), (BANKS[0], statement("bank_r", 1.0, relation=Relation.REPLACE_ONE))],
)
def test_statements_that_do_not_add_up_are_refused(statements: tuple[PrivacyStatement, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        FederationStatement(mode="SharedKey", statements=statements)
    with pytest.raises(ValueError, match="expected"):
        merge(statements)


def test_somebody_at_a_client_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="expected populations of"):
        FEDERATION.person_at(["bank_a", "bank_z"])


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(FEDERATION.to_json()), **changes})


def cheaper() -> str:
    content = json.loads(FEDERATION.to_json())
    content["statements"][0]["epsilon"] = 0.1
    return json.dumps(content)


def promising(*, anew: bool) -> str:
    """A claim that was edited, by somebody who does or does not compute the checksum anew."""
    content = json.loads(FEDERATION.to_json())
    content["claims"]["the server"] = "nothing can be learned"
    seal = content.pop("checksum")
    return json.dumps(content | {"checksum": checksum(content) if anew else seal})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        edited(private=False),
        edited(format="v3"),
        edited(extra=1),
        edited(statements=[]),
        edited(mode="EscrowKey"),
        edited(mode=""),
        edited(claims={}),
        edited(checksum=""),
        cheaper(),
        promising(anew=True),
        promising(anew=False),
        FEDERATION.to_json().replace('"mode": "SharedKey"', '"mode": "SharedKey", "mode": "SharedKey"'),
    ],
)
def test_json_that_is_no_federation_statement_or_was_edited_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        FederationStatement.from_json(text)


def test_queries_alone_make_a_statement_without_a_clipping_norm() -> None:
    asked = PrivacyStatement.of([GaussianRelease(noise_multiplier=5.0)], population="a", delta=1e-6, max_grad_norm=None)
    assert FederationStatement(mode="EscrowKey", statements=(asked,)).worst is asked


def test_the_worst_silo_is_named_for_each_claim() -> None:
    def bank(name: str, *, noise_multiplier: float, colluders: int) -> PrivacyStatement:
        noise = SiloNoise(
            weights=dict.fromkeys("abcdefgh", 1),
            clip_steps=64,
            noise_multiplier=noise_multiplier,
            coordinates=100,
            colluders=colluders,
        )
        promise = SiloPromise.of([noise.event()], delta=1e-6, noise=noise)
        return PrivacyStatement.of([GaussianRelease(noise_multiplier=8.0)], population=name, delta=1e-6, max_grad_norm=None, silo=promise)

    # Fewer shares carry the same noise where more may collude, so that one share alone has more of it.
    sums, single = bank("sums", noise_multiplier=3.9, colluders=6), bank("single", noise_multiplier=4.0, colluders=0)
    assert sums.silo is not None
    assert single.silo is not None
    assert sums.silo.epsilon > single.silo.epsilon
    assert sums.silo.single_upload_epsilon < single.silo.single_upload_epsilon
    claims = FederationStatement(mode="SharedKey", statements=(sums, single)).claims()
    assert claims["the server, about a silo as a whole"].startswith("at worst, at sums: ")
    assert claims["all other parties together, about a silo as a whole"].startswith("at worst, at single: ")


def test_the_worst_statement_is_found_at_one_delta() -> None:
    loose = PrivacyStatement.of([GaussianRelease(noise_multiplier=2.0)], population="loose", delta=1e-2, max_grad_norm=None)
    tight = PrivacyStatement.of([GaussianRelease(noise_multiplier=4.0)], population="tight", delta=1e-9, max_grad_norm=None)
    assert loose.epsilon < tight.epsilon  # and yet half the noise
    assert FederationStatement(mode="SharedKey", statements=(loose, tight)).worst.population == "loose"

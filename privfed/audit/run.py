"""Attacks canary rounds as each party sees them."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from torch import nn

from privfed.attacks.adversary import ADVERSARIES, SERVER, Adversary
from privfed.attacks.facts import TableSchema
from privfed.attacks.observation import CiphertextOnly, NotApplicable
from privfed.attacks.record import EncryptedRecord, Record
from privfed.attacks.scoring import advantage, interval
from privfed.attacks.views import View, view
from privfed.audit.background import Background, LineUp, Pulls
from privfed.audit.canaries import Canaries
from privfed.audit.findings import Audit, Finding, Measured
from privfed.audit.metering import meter_training
from privfed.audit.openings import read_opening
from privfed.audit.poisoned import rehearse_poisoning
from privfed.audit.rounds import Setting, audited_setting, control_setting, facts, hold_canary_round, smallest_batch
from privfed.audit.suite import SUITE, AuditAttack, Baseline, Score
from privfed.consortium import Consortium
from privfed.data.generator import check_generator
from privfed.he.threshold_key import ThresholdKey

_POOL = 1000
_FEWEST = 2  # repeats that make an interval
_RISK = 0.05  # that some attack is said to differ from guessing though none does, shared out evenly (Bonferroni)
_TARGET, _INSIDER = "canary_1", "canary_2"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """One party looking at canary rounds under one setting; `party` is whom it stands for where it was given a key."""

    setting: Setting
    adversary: Adversary
    party: str
    control: bool


def run_audit(
    consortium: Consortium,
    model: nn.Module,
    *,
    schema: TableSchema,
    repeats: int = 6,
    rows: int = 4,
    attacks: Sequence[AuditAttack[Any]] = SUITE,
    seconds: float = math.inf,
    rng: np.random.Generator | None = None,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Finds out what each party can read of the clients' rows, by attacking real rounds whose data are canaries.

    Every repeat draws canaries from the schema, then holds a round under the consortium's own protection and one without differential
    privacy, in which the same attacks must succeed: the planted positive. Parties that see ciphertexts alone get the key there. The
    consortium's data, keys and ledgers are not touched, and no privacy is spent.

    The rounds are a bad case for a client: as few clients as the policy allows, a few rows each, a single step that visits all of them,
    with as little noise as all steps of a round leave. Each is attacked alone: of several rounds that a record is in, more can be read.
    The attacks are those of `attacks`: that they fail bounds nothing. What bounds any attack is the epsilon of the ledger, if each client
    trains as it declares: that is measured as well, with canaries in every client's own training (`meter_training`). What a client that
    lies could make of a round is rehearsed under the consortium's rule and policy (`rehearse_poisoning`).

    Args:
        consortium: Whose protection is audited: mode, policy, parameters, loss, and the training of the client with the least noise.
        model: Architecture, and the weights before the round: attack the ones you start from, or the ones you have reached.
        schema: The columns of the model's input, from public knowledge.
        repeats: Number of independent batches of canaries, at least 2.
        rows: Canaries per client, at least 1; fewer where a client's steps are over fewer records, of which more can be read.
        attacks: What to try: `SUITE`, `DEEPER`, or others.
        seconds: Once so many have passed, no further repeat is begun, beyond the second. What was found does not decide when to stop.
        rng: Source of the canaries; left out, the operating system's entropy.
        progress: Is called after each repeat with the number of repeats done.

    Raises:
        TypeError: If `rng` is no generator.
        ValueError: If an argument is out of its range, or the schema has another number of columns than the data.
        UnsupportedModelError: If the model or the loss is one that cannot be trained or attacked.
    """
    started = time.perf_counter()
    columns = consortium.clients[0].data.columns
    if len(columns) != schema.width:
        raise ValueError(f"expected a schema of {len(columns)} columns, as the clients' data have, got {schema.width}")
    if repeats < _FEWEST or rows < 1:
        raise ValueError(f"expected at least 2 repeats and 1 row, got {repeats} and {rows}")
    if not seconds > 0:
        raise ValueError(f"expected seconds above 0, got {seconds}")
    if len({attack.name for attack in attacks}) != len(attacks):
        raise ValueError("expected attacks with names of their own")
    rng = np.random.default_rng() if rng is None else rng
    check_generator(rng)
    rows, names = min(rows, smallest_batch(consortium)), _canary_clients(consortium)
    pool = Canaries.draw(schema, count=_POOL, rng=rng)
    background = Background(pool=pool, module=model, pulls=Pulls.of(model, loss=consortium.loss, pool=pool))
    looks = _looks(consortium, rows=rows)
    batches = [{name: Canaries.draw(schema, count=rows, rng=rng) for name in names} for _ in range(repeats)]
    seeds = rng.integers(2**63, size=repeats)
    outcomes: defaultdict[tuple[_Look, str], list[Score | NotApplicable]] = defaultdict(list)
    first: dict[_Look, View] = {}
    done, opening = 0, None
    for canaries, seed in zip(batches, seeds, strict=True):
        if done >= _FEWEST and time.perf_counter() - started > seconds:
            break
        for record, look, seen in _views(looks, consortium, model, canaries, columns=columns):
            if opening is None and isinstance(record, EncryptedRecord):
                opening = read_opening(record)
            first.setdefault(look, seen)
            truth = Canaries.together([canaries[name] for name in seen.clients])
            line_up_rng = np.random.default_rng((seed, 1))
            line_ups = tuple(LineUp.of(truth, position, pool=pool, rng=line_up_rng) for position in range(rows))
            informed = replace(background, line_ups=line_ups)
            found = [attack.run(seen.observation, informed) for attack in attacks]
            for attack, result in zip(attacks, found, strict=True):
                applied = (
                    result if isinstance(result, NotApplicable) else attack.score(result, truth, informed, np.random.default_rng(seed))
                )
                outcomes[look, attack.name].append(applied)
        done += 1
        if progress is not None:
            progress(done)
    compared = sum(
        all(isinstance(result, Score) for result in outcomes[look, attack.name]) for look in looks if not look.control for attack in attacks
    )
    level = 1 - _RISK / max(1, compared)
    poisonings = rehearse_poisoning(consortium, model, schema=schema, rng=rng)
    return Audit(
        mode=consortium.mode,
        protection=looks[0].setting.protection,
        clients=len(names),
        rows=rows,
        repeats=done,
        findings=tuple(
            _finding(look, first[look], attack, outcomes[look, attack.name], rows=rows, level=1 - _RISK if look.control else level)
            for look in looks
            for attack in attacks
        ),
        trainings=tuple(meter_training(client, consortium=consortium, model=model) for client in consortium.clients),
        holdings={look.party: first[look].holdings for look in looks if not look.control},
        seconds=time.perf_counter() - started,
        opening=opening,
        poisonings=poisonings,
    )


def _canary_clients(consortium: Consortium) -> list[str]:
    """As many as may be the only ones in a sum: of two, each reads the other's update off it."""
    policy, fewest = consortium.policy, 3 if isinstance(consortium.keys, ThresholdKey) else 2
    return [f"canary_{number + 1}" for number in range(max(policy.min_clients, -int(-1 // policy.max_share), fewest))]


def _looks(consortium: Consortium, *, rows: int) -> tuple[_Look, ...]:
    """Who looks at what, grouped by setting: the consortium's own protection first, then the controls."""
    parties = ADVERSARIES[consortium.mode]
    audited = audited_setting(consortium, rows=rows)
    looks = [_Look(setting=audited, adversary=party, party=party.name, control=False) for party in parties]
    control = control_setting(consortium.params, rows=rows, encrypted=consortium.encrypted)
    for party in parties:
        blind = consortium.encrypted and not (party.holds_key or party.gets_model)
        able = replace(party, name=f"{party.name}, given the key", holds_key=True) if blind else party
        looks.append(_Look(setting=control, adversary=able, party=party.name, control=True))
    if consortium.encrypted:
        contrast = replace(SERVER, name=f"{SERVER.name} of a run without encryption")
        looks.append(_Look(setting=replace(control, encrypted=False), adversary=contrast, party=SERVER.name, control=True))
    return tuple(looks)


def _views(
    looks: Sequence[_Look], consortium: Consortium, model: nn.Module, canaries: Mapping[str, Canaries], *, columns: tuple[str, ...]
) -> Iterator[tuple[Record, _Look, View]]:
    """Holds one round per setting and shows it to everybody who looks at that setting."""
    target = canaries[_TARGET]
    for setting, group in groupby(looks, key=lambda look: look.setting):
        record = hold_canary_round(consortium, model, setting, canaries, columns=columns)
        known = facts(setting, model, loss=consortium.loss, canaries=target)
        for look in group:
            yield record, look, view(record, known, look.adversary, target=_TARGET, insider=_INSIDER)


def _finding(
    look: _Look, seen: View, attack: AuditAttack[Any], results: Sequence[Score | NotApplicable], *, rows: int, level: float
) -> Finding:
    missing = [result for result in results if isinstance(result, NotApplicable)]
    scored = [result for result in results if isinstance(result, Score)]
    outcome = missing[0] if missing else _measured(scored, rows=rows * len(seen.clients), level=level)
    ciphertext = seen.observation.seen
    return Finding(
        adversary=look.adversary,
        party=look.party,
        attack=attack.name,
        measure=attack.measure,
        protection=look.setting.protection,
        control=look.control,
        outcome=outcome,
        bytes_seen=ciphertext.bytes_seen if isinstance(ciphertext, CiphertextOnly) else None,
    )


def _measured(results: Sequence[Score], *, rows: int, level: float) -> Measured:
    baselines = {kind: float(np.mean([result.baseline[kind] for result in results])) for kind in Baseline}
    stronger = max(baselines, key=lambda kind: baselines[kind])
    score = interval([result.value[stronger] for result in results])
    return Measured(
        score=score,
        baseline=baselines[stronger],
        stronger=stronger,
        baselines=baselines,
        gain=interval([result.value[stronger] - result.baseline[stronger] for result in results], level=level),
        advantage=advantage(score.mean, baseline=baselines[stronger]),
        certified=float(np.mean([result.certified - result.false for result in results])),
        false_certificates=sum(result.false for result in results),
        rows=rows,
        example=results[0].example,
        bound=results[0].bound,
    )

"""A bank that answers requests: its session, from its own folder and its own code."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privfed.agreement import Agreement
from privfed.client import Client, Trainer
from privfed.engines.envelope import Answer, Request
from privfed.engines.last_asked import LastAsked
from privfed.engines.party_folder import ROSTER, SHARED_KEY, STATE
from privfed.engines.site_code import called, run_site, with_rule
from privfed.errors import BudgetExceededError, OpeningRefusedError, PrivFedError
from privfed.escrow_session import EscrowSession
from privfed.identity import Identity
from privfed.keys.load import load_shared_key
from privfed.keys.party import Party
from privfed.phases import Outcome, Step
from privfed.round import Participant, ask
from privfed.session import ClientSession
from privfed.threshold_session import ThresholdSession
from privfed.training.loss import binary_cross_entropy
from privfed.training.model import values_of
from privfed.trust import EscrowTrust, ThresholdTrust

if TYPE_CHECKING:
    from privfed.training.randomness import Randomness

_REFUSALS = {Outcome.DONE: "", Outcome.OVER_BUDGET: BudgetExceededError.__name__, Outcome.ABORTED: OpeningRefusedError.__name__}


class Bank:
    """One bank's side of a session, opened from its folder.

    Args:
        folder: The bank's; see `privfed.engines.party_folder`.
        agreement: What is in it.
        identity: The bank's signing key.

    Raises:
        PrivFedError: As `ClientSession`, `Trainer` and `ClientSession.check_charges`.
        ValueError: If `site.py` or `rule.py` does not define what it must.
    """

    def __init__(self, folder: Path, *, agreement: Agreement, identity: Identity) -> None:
        self._asked = LastAsked(folder)
        site = run_site(folder)
        self.agreement = agreement = with_rule(agreement, folder)
        client = called(site, "client")
        if not isinstance(client, Client):
            raise ValueError(f"expected client() to return a Client, got {type(client).__name__}; nothing was done")
        self._client = client
        try:
            model = called(site, "model")
            start = values_of(model)
            # The seam of `Simulation`, for tests: with it, no differential privacy may be claimed, and no statement is made.
            randomness: Callable[[str, int], Randomness] | None = site.get("_randomness")
            trainer = Trainer(
                client=client,
                model=model,
                start=start,
                loss=site.get("loss", binary_cross_entropy),
                params=agreement.params,
                correction=called(site, "correction") if "correction" in site else None,
                silo=agreement.silo,
                randomness=None if randomness is None else lambda number: randomness(client.name, number),
            )
            terms: dict[str, Any] = {"trainer": trainer, "identity": identity, "agreement": agreement}
            place: dict[str, Any] = {"start": start, "directory": folder / STATE}
            if isinstance(agreement.trust, ThresholdTrust):
                self._session: ClientSession = ThresholdSession(**terms, party=Party.of(identity, folder), **place)
            elif isinstance(agreement.trust, EscrowTrust):
                self._session = EscrowSession(**terms, party=Party.of(identity, folder), **place)
            else:
                shared: dict[str, Any] = {"keys": load_shared_key(folder / SHARED_KEY, roster=folder / ROSTER)}
                self._session = ClientSession(**terms, **shared, **place)
            try:
                self._session.check_charges()
            except BaseException:
                self._session.close()
                raise
        except BaseException:
            self._close_ledger()
            raise
        self._participant = Participant(self._session)
        self.seeded = randomness is not None

    @property
    def epsilon(self) -> float | None:
        """What the bank's ledger says was spent; None without a ledger."""
        ledger = self._client.ledger
        spent = math.inf if ledger is None else ledger.spent()
        return spent if math.isfinite(spent) else None

    def answer(self, request: Request) -> tuple[Answer, PrivFedError | None]:
        """Does what it is asked. Beside the answer there is the error for which the bank did not open an aggregate, for its own eyes.

        Raises:
            PrivFedError: As `privfed.round.ask`.
            ValueError: If a bank is not asked for this step.
        """
        name, context, session = self._session.name, request.context, self._session
        if request.step is Step.STATUS:
            lost = isinstance(session, ThresholdSession) and session.key_lost(context)
            return Answer(name=name, facts={"rounds": list(session.state.rounds), "secret_lost": lost}), None
        answer, error = Answer(name=name), None
        if request.step in (Step.SETUP, Step.COMMIT, Step.UPLOAD, Step.APPROVE):
            session.check_history(context)
            self._asked.begin(context)
        try:
            for reply in ask(self._participant, request.step, context, request.payload, name=name):
                weighing = reply.weighing
                facts: dict[str, Any] = {}
                if weighing is not None:
                    facts = {"fallback": weighing.fallback.name, "disclosed": weighing.disclosed, "assurance": weighing.assurance}
                answer = Answer(name=name, refusal=_REFUSALS[reply.outcome], facts=facts, payload=reply.message)
        except PrivFedError as caught:
            if not answer.refusal:
                raise
            error = caught
        return answer, error

    def opened(self, request: Request) -> dict[str, object] | None:
        """What the bank may keep of a round that is in its model: for its record of rounds."""
        context, opened = request.context, self._participant.opened
        if request.step is not Step.OPEN or context.round not in self._session.state.rounds:
            return None
        return {
            "round": context.round,
            "attempt": context.attempt,
            "coefficients": dict(opened.coefficients) if opened is not None and opened.round == context.round else None,
            "epsilon": self.epsilon,
        }

    def close(self) -> None:
        """Lets go of the folder and of the ledger."""
        self._session.close()
        self._close_ledger()

    def _close_ledger(self) -> None:
        if self._client.ledger is not None:
            self._client.ledger.close()

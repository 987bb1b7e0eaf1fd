"""A consortium of folders, one for each party, as a deployment has them: banks on synthetic transactions, each with its own `site.py`."""

import os
import runpy
import textwrap
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement
from privfed.client import Client
from privfed.consortium import Consortium, is_escrow
from privfed.engines.dropouts import Absences
from privfed.engines.local import Simulation
from privfed.engines.party_folder import AGREEMENT, ESCROW_KEY, IDENTITY, ROSTER, RULE, SHARED_KEY, SITE
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.he.threshold_key import ThresholdKey
from privfed.history import History
from privfed.identity import Identity, Roster
from privfed.keys.chain import KeyChain
from privfed.keys.party import Party
from privfed.keys.roster import PinnedRoster
from privfed.state import ModelState, ModelStore
from privfed.training.model import values_of
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.written_agreement import encode_agreement

SERVER, HOLDER = "server", "key_holder"
ROWS, ROUNDS = 300, 3

MODEL = """
    import os
    from pathlib import Path

    import numpy as np
    import torch
    from privfed import PRE, Budget, Client, DpSgd, Ledger, NonPrivate, Scaffold, features, generate_transactions, mlp
    from privfed.training.randomness import _SeededRandomness


    def model():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return mlp(inputs=10, hidden=(8,))


    def _randomness(name, number):
        return _SeededRandomness(1000 * INDEX + number)
"""
"""Of every `site.py` here: the model, and the randomness by the `INDEX` that the rest of the file names."""
_SITE = """
    INDEX, WEIGHT, PRIVATE, EPSILON = {index}, {weight}, {private}, {epsilon}
    FOLDER = Path(__file__).parent


    def client():
        table = generate_transactions(rows={rows}, fraud_rate=0.05, rng=np.random.default_rng(INDEX))
        data = features(table, PRE)
        if not PRIVATE:
            training = NonPrivate(learning_rate=0.3, batch_size=20, steps=4, seed=INDEX)
            return Client("bank_" + str(INDEX), data, training=training, weight=WEIGHT)
        training = DpSgd(
            noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.2, expected_batch_size=60, steps=3, learning_rate=0.3, max_records=1000
        )
        budget = Budget(epsilon=EPSILON, delta=1e-5)
        ledger = Ledger.open(FOLDER / "records.ledger", population="bank_" + str(INDEX), budget=budget)
        return Client("bank_" + str(INDEX), data, training=training, ledger=ledger, weight=WEIGHT)
"""


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """The folders of all parties, and what only a test may hold together."""

    root: Path
    agreement: Agreement
    keys: Any
    names: tuple[str, ...]

    def folder(self, name: str) -> Path:
        return self.root / name

    def state(self, name: str) -> ModelState:
        """The model as a bank's folder holds it."""
        state = ModelStore(self.folder(name) / "state" / "model.npz", layout=self.agreement.layout).load()
        assert state is not None, f"{name} has opened nothing"
        return state


def deploy(
    root: Path,
    *,
    keys: Any = None,
    params: CkksParams | None = None,
    count: int = 3,
    private: bool = True,
    epsilons: Mapping[int, float] | None = None,
    chain: bool = False,
    site: str = "",
    rule_file: str = "",
    weights: Mapping[str, float] | None = None,
    **terms: Any,
) -> Deployed:
    """Writes the folders of a server, some banks and, in `EscrowKey` mode, the key holder. Private weights stay in the banks' own files."""
    keys = SharedKey.generate() if keys is None else keys
    names = tuple(f"bank_{index}" for index in range(count))
    weights = weights or {name: 1.0 + index for index, name in enumerate(names)}
    parties = {}
    for index, name in enumerate(names):
        parties[name] = Party.create(_made(root) / name, name=name)
        own = {"index": index, "weight": weights[name], "private": private, "epsilon": (epsilons or {}).get(index, 50.0), "rows": ROWS}
        (root / name / SITE).write_text(textwrap.dedent(MODEL) + textwrap.dedent(_SITE).format(**own) + textwrap.dedent(site))
        (root / name / SITE).chmod(0o600)
    server = Identity.generate(SERVER)
    (root / SERVER).mkdir(mode=0o700)
    server.save(root / SERVER / IDENTITY)
    pinned = PinnedRoster(server=server.public, members=tuple(party.public for party in parties.values()))
    session = os.urandom(16)
    if chain:
        keys = KeyChain.generate(pinned)
        session = keys.facts.session
    params = params or (CkksParams.threshold(clients=count) if isinstance(keys, ThresholdKey) else CkksParams.standard())
    encryption_keys = {name: party.public.encryption_key for name, party in parties.items()}
    trust: Any = None
    if isinstance(keys, ThresholdKey):
        trust = ThresholdTrust(key=keys, encryption_keys=encryption_keys)
    elif is_escrow(keys):
        holder = Identity.generate(HOLDER)
        (root / HOLDER).mkdir(mode=0o700)
        holder.save(root / HOLDER / IDENTITY)
        keys.save(root / HOLDER / ESCROW_KEY)
        trust = EscrowTrust(holder=holder.public, encryption_keys=encryption_keys)
    else:
        for name in names:
            keys.save(root / name / SHARED_KEY)
            (root / name / ROSTER).write_text("\n".join([f"server {SERVER} {server.public.public_key.hex()} {server.public.fingerprint}",
                                                        *(member.line for member in pinned.members)]))  # fmt: skip
    start = values_of(runpy.run_path(str(root / names[0] / SITE))["model"]())
    terms = {"rule": FedAvg()} | terms
    agreement = Agreement(
        session=session,
        roster=Roster(server=server.public, clients=tuple(party.public.identity for party in parties.values())),
        params=params,
        layout=start.layout,
        start=start.digest,
        weights=dict.fromkeys(names, 1.0) if "private_weights" in terms else weights,
        populations={name: name for name in names} if private else {},
        trust=trust,
        **terms,
    )
    for folder in root.iterdir():
        if rule_file and folder.name != SERVER:
            (folder / RULE).write_text(textwrap.dedent(rule_file))
            (folder / RULE).chmod(0o600)
        (folder / AGREEMENT).write_text(encode_agreement(agreement))
        (folder / AGREEMENT).chmod(0o644)
        if (folder / ROSTER).exists():
            (folder / ROSTER).chmod(0o644)
    return Deployed(root=root, agreement=agreement, keys=keys, names=names)


def _made(root: Path) -> Path:
    root.mkdir(mode=0o700, exist_ok=True)
    return root


def simulated(deployed: Deployed, folder: Path, *, rounds: int = ROUNDS, absences: Absences | None = None, **options: Any) -> History:
    """The same banks with the same randomness in `engines.local`, with ledgers of their own."""
    folder.mkdir()
    agreement = deployed.agreement
    with ExitStack() as stack:
        sites, clients = {}, []
        for name in deployed.names:
            own = folder / name
            own.mkdir()
            (own / SITE).write_text((deployed.folder(name) / SITE).read_text())
            sites[name] = runpy.run_path(str(own / SITE))
            client: Client = sites[name]["client"]()
            if client.ledger is not None:
                stack.callback(client.ledger.close)
            clients.append(client)
        keys = SharedKey.generate() if isinstance(deployed.keys, KeyChain) else deployed.keys
        site = sites[deployed.names[0]]
        if "correction" in site:
            options["correction"] = site["correction"]()
        consortium = Consortium(clients, keys=keys, params=agreement.params, policy=agreement.policy, **options)

        def randomness(name: str, number: int) -> Any:
            return sites[name]["_randomness"](name, number)

        with Simulation(consortium, site["model"](), _randomness=randomness) as simulation:
            return simulation.run(rounds=rounds, absences=absences)

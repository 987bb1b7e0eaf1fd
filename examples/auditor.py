"""An auditor recomputes what a bank claims: from its ledger, and with two accountants that are not privfed's. All of it is made up here."""

import sys
import tempfile
from pathlib import Path

import dp_accounting
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.rdp import RdpAccountant

import privfed as pf
from privfed.dp.mechanism import PoissonSampledGaussian

if len(sys.argv) > 1:
    raise SystemExit("this example makes its own ledger; of yours, privfed ledger verify and privfed ledger show tell")
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
training = pf.DpSgd(noise_multiplier=1.1, max_grad_norm=1.0, sample_rate=0.02, expected_batch_size=256, steps=40, learning_rate=0.5)
# The bank: ten rounds, each charged before it is trained. It hands over the ledger and its statement.
with pf.Ledger.open(folder / "bank.ledger", population="bank", budget=pf.Budget(epsilon=4.0, delta=1e-5)) as ledger:
    for number in range(10):
        ledger.commit(ledger.reserve(training.event(), session=b"example", round=number, attempt=0))
        remembered = ledger.head  # peers keep it
    claim = pf.PrivacyStatement.of(ledger.events(), population="bank", delta=1e-5, max_grad_norm=training.max_grad_norm).to_json()
# The auditor: was the ledger altered, does the statement follow from it, and is its epsilon right?
with pf.Ledger.read(folder / "bank.ledger") as ledger:  # checks every row, writes to no file
    ledger.rows_since(remembered)  # refuses an older copy, and another ledger
    events = ledger.events()
statement = pf.PrivacyStatement.from_json(claim)  # refuses a statement whose epsilon is not that of its events
if statement.events != events:
    raise SystemExit("the statement is not about this ledger")
print("ledger verified:", len(events), "charges")
print(f"claimed: epsilon {statement.epsilon:.4f} at delta {statement.delta:g}; recomputed by privfed: {statement.recompute():.4f}")
for accountant in (PLDAccountant(), RdpAccountant()):
    for event in events:
        if not isinstance(event, PoissonSampledGaussian):
            raise SystemExit("the ledger holds something else than DP-SGD")
        step = dp_accounting.PoissonSampledDpEvent(event.sample_rate, dp_accounting.GaussianDpEvent(event.noise_multiplier))
        accountant.compose(step, event.steps)
    print(f"{type(accountant).__name__}: epsilon {accountant.get_epsilon(statement.delta):.4f}")

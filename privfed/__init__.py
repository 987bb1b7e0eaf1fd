"""Privacy-first federated learning for consortia.

The names below are the recipe layer: what an integrator needs for a first run, and all that is promised. They load on
first use (PEP 562), so that importing `privfed.server` on a server does not load torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from privfed.aggregation.rules import FedAvg as FedAvg
    from privfed.aggregation.rules import MultiKrum as MultiKrum
    from privfed.agreement import Validator as Validator
    from privfed.audit.run import run_audit as run_audit
    from privfed.client import Client as Client
    from privfed.consortium import Consortium as Consortium
    from privfed.consortium import Plaintext as Plaintext
    from privfed.data.frames import samples_from_frame as samples_from_frame
    from privfed.data.partition import dirichlet_partition as dirichlet_partition
    from privfed.data.paysim import NOBAL as NOBAL
    from privfed.data.paysim import PRE as PRE
    from privfed.data.paysim import features as features
    from privfed.data.paysim import grouped_split as grouped_split
    from privfed.data.paysim import load_paysim as load_paysim
    from privfed.data.samples import Samples as Samples
    from privfed.data.transactions import generate_transactions as generate_transactions
    from privfed.dp.ledger import Ledger as Ledger
    from privfed.dp.mechanism import Budget as Budget
    from privfed.dp.statement import PrivacyStatement as PrivacyStatement
    from privfed.engines.alone import train_alone as train_alone
    from privfed.engines.local import simulate as simulate
    from privfed.errors import PrivFedError as PrivFedError
    from privfed.estimator import FederatedClassifier as FederatedClassifier
    from privfed.export import save_safetensors as save_safetensors
    from privfed.he.escrow_secret import EscrowKey as EscrowKey
    from privfed.he.params import CkksParams as CkksParams
    from privfed.he.product_params import ProductParams as ProductParams
    from privfed.he.secret import SharedKey as SharedKey
    from privfed.he.threshold_key import ThresholdKey as ThresholdKey
    from privfed.history import History as History
    from privfed.policy import OpeningPolicy as OpeningPolicy
    from privfed.report.write import write_report as write_report
    from privfed.saved import load_run as load_run
    from privfed.saved import save_run as save_run
    from privfed.training.loss import BinaryCrossEntropy as BinaryCrossEntropy
    from privfed.training.mechanism import DpSgd as DpSgd
    from privfed.training.mechanism import NonPrivate as NonPrivate
    from privfed.training.model import load_values as load_values
    from privfed.training.model import mlp as mlp
    from privfed.training.objective import FedProx as FedProx
    from privfed.training.scaffold import Scaffold as Scaffold

_HOMES = {
    "FedAvg": "privfed.aggregation.rules",
    "MultiKrum": "privfed.aggregation.rules",
    "OpeningPolicy": "privfed.policy",
    "Validator": "privfed.agreement",
    "run_audit": "privfed.audit.run",
    "Client": "privfed.client",
    "Consortium": "privfed.consortium",
    "Plaintext": "privfed.consortium",
    "samples_from_frame": "privfed.data.frames",
    "dirichlet_partition": "privfed.data.partition",
    "NOBAL": "privfed.data.paysim",
    "PRE": "privfed.data.paysim",
    "features": "privfed.data.paysim",
    "grouped_split": "privfed.data.paysim",
    "load_paysim": "privfed.data.paysim",
    "Samples": "privfed.data.samples",
    "generate_transactions": "privfed.data.transactions",
    "Ledger": "privfed.dp.ledger",
    "Budget": "privfed.dp.mechanism",
    "PrivacyStatement": "privfed.dp.statement",
    "train_alone": "privfed.engines.alone",
    "simulate": "privfed.engines.local",
    "PrivFedError": "privfed.errors",
    "FederatedClassifier": "privfed.estimator",
    "save_safetensors": "privfed.export",
    "EscrowKey": "privfed.he.escrow_secret",
    "CkksParams": "privfed.he.params",
    "ProductParams": "privfed.he.product_params",
    "SharedKey": "privfed.he.secret",
    "ThresholdKey": "privfed.he.threshold_key",
    "History": "privfed.history",
    "write_report": "privfed.report.write",
    "load_run": "privfed.saved",
    "save_run": "privfed.saved",
    "BinaryCrossEntropy": "privfed.training.loss",
    "DpSgd": "privfed.training.mechanism",
    "NonPrivate": "privfed.training.mechanism",
    "load_values": "privfed.training.model",
    "mlp": "privfed.training.model",
    "FedProx": "privfed.training.objective",
    "Scaffold": "privfed.training.scaffold",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'privfed' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(["__doc__", "__version__", *_HOMES])

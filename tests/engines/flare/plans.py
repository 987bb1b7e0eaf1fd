"""Plans of small deployments."""

from pathlib import Path

SITE = """
import torch
from privfed.training.model import mlp

def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(8, hidden=(16,))
"""

PLAN = """
name = "fraud"
engine = "flare"
host = "localhost"
port = {port}
rounds = 3
site = "site.py"

[banks]
bank_a = 1.0
bank_b = 1.0
bank_c = 0.5
"""


def write_plan(folder: Path, *, port: int, site: str = SITE, plan: str = PLAN) -> Path:
    (folder / "site.py").write_text(site)
    (folder / "fraud.toml").write_text(plan.format(port=port))
    return folder / "fraud.toml"

"""Whole rounds, from setup to opening, of which each module's own tests see a part."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from privfed.errors import AlreadyOpenedError
from privfed.he.params import CkksParams
from privfed.policy import OpeningPolicy
from privfed.update import Layout


@st.composite
def sessions(draw: st.DrawFn) -> dict[str, Any]:
    """2-25 clients, 1-200 tensors, up to 3 rounds in which clients drop out at either of two points."""
    count = draw(st.one_of(st.integers(2, 6), st.integers(7, 25)))
    tensors = draw(st.one_of(st.integers(1, 5), st.integers(6, 200)))
    shapes = tuple(draw(st.sampled_from([(), (1,), (2, 3), (7,), (1, 2, 2), (900,)])) for _ in range(min(tensors, 5))) + ((2,),) * (
        tensors - 5
    )
    scale = draw(st.sampled_from([1, 1, 0.37, 5000.0]))  # integers as they are, fractions and integers that do not fit
    weights = [draw(st.integers(1, 9)) * scale for _ in range(count)]
    rounds = [
        (draw(st.sets(st.integers(2, count - 1), max_size=count // 2)) if count > 2 else set(), draw(st.booleans()))
        for _ in range(draw(st.integers(1, 3 if count < 10 else 1)))
    ]
    profile = draw(st.sampled_from(["standard", "compact", "parity", "compatible"]))
    seed = draw(st.integers(0, 2**32 - 1))
    return {"profile": profile, "count": count, "shapes": shapes, "weights": weights, "rounds": rounds, "seed": seed}


def parameters(profile: str, count: int) -> CkksParams:
    if profile in ("parity", "compatible"):
        return getattr(CkksParams, profile)(bound=0.5, clients=count)
    return getattr(CkksParams, profile)(bound=0.5)


FIFTY = {"count": 50, "shapes": ((2,),) * 200, "weights": [0.5, 7.25] * 25, "rounds": [({3, 17, 40}, False)], "seed": 1}


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(sessions())
@example(FIFTY | {"profile": "standard"})
@example(FIFTY | {"profile": "parity"})
def test_the_protocol_opens_to_the_integer_weighted_sum_bit_for_bit(people: Any, session: dict[str, Any]) -> None:
    rng = np.random.default_rng(session["seed"])
    layout = Layout(names=tuple(f"t{index}" for index in range(len(session["shapes"]))), shapes=session["shapes"])
    names = [f"bank_{index:02}" for index in range(session["count"])]
    if session["profile"] in ("parity", "compatible"):
        assume(2 * max(session["weights"]) <= sum(session["weights"]))
    # What durability costs is not what this test is about.
    with tempfile.TemporaryDirectory() as directory, patch("os.fsync"):
        parties = people.meet(
            Path(directory),
            count=session["count"],
            layout=layout,
            params=parameters(session["profile"], session["count"]),
            weights=dict(zip(names, session["weights"], strict=True)),
            policy=OpeningPolicy(min_clients=2, max_share=0.95),
        )
        for number, (dropped, before_setup) in enumerate(session["rounds"]):
            answering = [name for index, name in enumerate(names) if index not in dropped]
            joint = parties.round(number)
            joint.setup(*(answering if before_setup else names))
            # Beyond the bound on purpose: what is clipped must be clipped alike everywhere.
            updates = {name: rng.normal(scale=0.3, size=layout.size) for name in answering}
            message = joint.upload(updates).approve_all().server.aggregate()
            params, weighting = parties.agreement.params, parties.agreement.weighting
            # Who pre-scales has a weight among all; else the weights are apportioned among those who answered.
            rule, whose = parties.agreement.rule, names if params.prescaled else answering
            apportioned = rule.coefficients({name: parties.agreement.weights[name] for name in whose}, total=params.weight_total)
            coefficients = {name: apportioned[name] for name in answering}
            holder = joint.key_holder(names[-1])
            aggregate = holder.open(message)
            assert dict(aggregate.coefficients) == coefficients
            np.testing.assert_array_equal(aggregate.vector.values, joint.expected_mean(updates, coefficients))
            exact = sum(coefficients[name] * np.clip(updates[name], -0.5, 0.5) for name in answering) / sum(coefficients.values())
            allowed = params.mean_error(len(answering), weighting.divisor(answering)) if params.prescaled else params.max_error
            assert np.abs(aggregate.vector.values - exact).max() <= allowed
            holder.finish()
            with pytest.raises(AlreadyOpenedError):
                holder.open(message)


WHOLE_ROUND = """
import sys

sys.modules["torch"] = sys.modules["opacus"] = None  # importing either raises from here on

from pathlib import Path

import privfed.server
import privfed.keyholder
from privfed.aggregation.rules import FedAvg
from privfed.agreement import Agreement, RoundContext
from privfed.policy import OpeningPolicy
from privfed.approval import approve
from privfed.digest import hash_message
from privfed.errors import AlreadyOpenedError, CohortError, InvalidMessageError, OpeningRefusedError
from privfed.he.params import CkksParams
from privfed.he.secret import SharedKey
from privfed.identity import Identity, Roster
from privfed.journal import Journal
from privfed.protect import protect, round_key
from privfed.update import Layout, PlainVector, Update
from privfed.wire import encode_setup, encode_upload

directory, server_identity = Path(sys.argv[1]), Identity.generate("server")
clients = {name: Identity.generate(name) for name in ("a", "b", "c")}
agreement = Agreement(
    session=b"s" * 16,
    roster=Roster(server=server_identity.public, clients=tuple(client.public for client in clients.values())),
    params=CkksParams.standard(),
    layout=Layout(names=("w",), shapes=((2,),)),
    start=b"start " * 5 + b"..",
    weights={"a": 1, "b": 2, "c": 1},
    rule=FedAvg(),
)
context, group = RoundContext(agreement=agreement, round=0), SharedKey.generate()
server = privfed.server.Server(context=context, identity=server_identity, selected=tuple(clients), spool=directory)


def refused(error, call, *arguments):
    try:
        call(*arguments)
    except error:
        return
    raise SystemExit(f"{call} was not refused")


refused(ValueError, lambda: OpeningPolicy(min_clients=1))
refused(OpeningRefusedError, agreement.coefficients, ["a", "b"])
refused(CohortError, server.start_uploads)
keys = {name: round_key(group, context) for name in clients}
for name, client in clients.items():
    server.receive_setup(encode_setup(context, client, keys[name].key_id))
server.start_uploads()
uploads = {}
for value, (name, client) in enumerate(clients.items()):
    vector = PlainVector(layout=agreement.layout, values=[value / 4, -value / 4])
    protected = protect(Update(sender=name, round=0, vector=vector), context, round_key=keys[name])
    refused(TypeError, encode_upload, context, client, Update(sender=name, round=0, vector=vector))
    uploads[name] = encode_upload(context, client, protected.update)
    refused(InvalidMessageError, server.receive_upload, uploads[name][:-1] + bytes([uploads[name][-1] ^ 1]))
    server.receive_upload(uploads[name])
announced = server.close()
refused(CohortError, server.aggregate)
for name, client in clients.items():
    journal = Journal(directory / name)
    server.receive_approval(
        approve(context, client, announced, key_id=keys[name].key_id, upload_hash=hash_message(uploads[name]), journal=journal)
    )
message = server.aggregate()
holder = privfed.keyholder.KeyHolder(context=context, round_key=keys["a"], journal=Journal(directory / "a"))
mean = holder.open(message).vector.values
holder.finish()
refused(AlreadyOpenedError, holder.open, message)
if abs(mean - [0.25, -0.25]).max() > agreement.params.max_error:
    raise SystemExit("wrong mean")
print("opened", __debug__)
"""


def test_a_whole_round_runs_without_torch_and_opacus_and_refuses_under_python_o(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-O", "-c", WHOLE_ROUND, str(tmp_path)]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert shown.stdout == "opened False\n", shown.stderr

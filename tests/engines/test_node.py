"""What a node answers to whom: hostile bytes, strangers, other sessions, old rounds; and what it leaves in its folder."""

import json
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privfed.agreement import RoundContext
from privfed.engines import site_code
from privfed.engines.coordinator import coordinate
from privfed.engines.envelope import Answer, Request, open_answer, open_request, seal_answer, seal_request
from privfed.engines.node import Node
from privfed.engines.party_folder import answering_parties
from privfed.errors import AgreementMismatchError, DamagedFileError, FolderInUseError, InvalidMessageError
from privfed.he.escrow_secret import EscrowKey
from privfed.he.params import CkksParams
from privfed.identity import Identity
from privfed.phases import Step
from tests.engines.deployed import HOLDER, SERVER, Deployed, deploy
from tests.engines.exchanges import LocalExchange
from tests.engines.test_coordinator import events


def server_of(deployed: Deployed) -> Identity:
    return Identity.load(deployed.folder(SERVER) / "identity.pem", name=SERVER)


def asking(deployed: Deployed, step: Step, **changes: Any) -> bytes:
    context = RoundContext(agreement=changes.pop("agreement", deployed.agreement), round=changes.pop("round", 0))
    return seal_request(Request(step=step, context=context, **changes), server_of(deployed))


def answered(deployed: Deployed, node: Node, request: bytes) -> Answer:
    return open_answer(node.answer(request), request, answering_parties(deployed.agreement)[node.name], agreement=deployed.agreement)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    return deploy(tmp_path_factory.mktemp("node") / "parties", private=False)


@pytest.fixture(scope="module")
def node(deployed: Deployed) -> Any:
    with Node(deployed.folder("bank_0")) as node:
        yield node


def test_a_request_and_an_answer_are_read_as_they_were_written(deployed: Deployed) -> None:
    context = RoundContext(agreement=deployed.agreement, round=7, attempt=2, history=bytes(range(32)))
    request = Request(step=Step.STORE, context=context, about="bank_1", payload=b"an upload")
    data = seal_request(request, server_of(deployed))
    assert open_request(data, deployed.agreement) == request
    bank = Identity.load(deployed.folder("bank_1") / "identity.pem", name="bank_1")
    answer = Answer(name="bank_1", refusal="KeyErasedError", facts={"rounds": [0, 1]}, payload=b"a message")
    assert open_answer(seal_answer(answer, data, bank), data, bank.public, agreement=deployed.agreement) == answer


@given(data=st.binary(max_size=400))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_get_an_answer_that_says_nothing_but_that_they_are_invalid(deployed: Deployed, node: Node, data: bytes) -> None:
    assert answered(deployed, node, data) == Answer(name="bank_0", refusal="InvalidMessageError")


@given(place=st.integers(0), bit=st.integers(0, 7))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_request_with_any_bit_changed_is_invalid(deployed: Deployed, node: Node, place: int, bit: int) -> None:
    request = bytearray(asking(deployed, Step.STATUS))
    request[place % len(request)] ^= 1 << bit
    assert answered(deployed, node, bytes(request)).refusal == "InvalidMessageError"


@given(place=st.integers(0), bit=st.integers(0, 7))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_answer_with_any_bit_changed_is_invalid(deployed: Deployed, node: Node, place: int, bit: int) -> None:
    request = asking(deployed, Step.STATUS)
    reply = bytearray(node.answer(request))
    reply[place % len(reply)] ^= 1 << bit
    with pytest.raises(InvalidMessageError):
        open_answer(bytes(reply), request, deployed.agreement.roster.client("bank_0"), agreement=deployed.agreement)


def test_an_answer_to_one_request_is_no_answer_to_another(deployed: Deployed, node: Node) -> None:
    first, second = asking(deployed, Step.STATUS), asking(deployed, Step.STATUS, round=1)
    bank = deployed.agreement.roster.client("bank_0")
    reply = node.answer(first)
    assert open_answer(reply, first, bank, agreement=deployed.agreement).facts["rounds"] == []
    with pytest.raises(InvalidMessageError):
        open_answer(reply, second, bank, agreement=deployed.agreement)


def test_what_is_authentic_and_malformed_is_invalid(deployed: Deployed) -> None:
    server = server_of(deployed)
    body = asking(deployed, Step.STATUS)[:-64]
    for malformed in (body[:-8], body + b"more", body[:9] + b"\x63" + body[10:], b"privfed!" + body[8:], body[:8] + b"\x02" + body[9:]):
        with pytest.raises(InvalidMessageError):
            open_request(malformed + server.sign(malformed), deployed.agreement)
    bank = Identity.load(deployed.folder("bank_1") / "identity.pem", name="bank_1")
    for refusal in ("ValueError", 'kind"} 1', "NoSuchError", "__name__"):
        with pytest.raises(InvalidMessageError):
            open_answer(seal_answer(Answer(name="bank_1", refusal=refusal), body, bank), body, bank.public, agreement=deployed.agreement)
    whole = seal_answer(Answer(name="bank_1"), body, bank)[:-64]
    for facts in (b"[]", b"{", b'{"a":1,"a":2}', b'{"a":NaN}', b"\xff\xff", b"[" * 100_000):
        malformed = whole[:42] + len(facts).to_bytes(4, "big") + facts + bytes(8)
        with pytest.raises(InvalidMessageError):
            open_answer(malformed + bank.sign(malformed), body, bank.public, agreement=deployed.agreement)


def test_bytes_that_are_longer_than_any_message_are_not_looked_at(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    from privfed.engines import envelope

    monkeypatch.setattr(envelope, "most_payload_bytes", lambda _: 0)
    monkeypatch.setattr(envelope, "_OVERHEAD_BYTES", 200)
    assert envelope.most_bytes(deployed.agreement) == 200
    request = asking(deployed, Step.OPEN, payload=bytes(300))
    with pytest.raises(InvalidMessageError):
        open_request(request, deployed.agreement)


def test_a_request_of_another_server_is_invalid(deployed: Deployed, node: Node) -> None:
    request = seal_request(
        Request(step=Step.STATUS, context=RoundContext(agreement=deployed.agreement, round=0)), Identity.generate(SERVER)
    )
    assert answered(deployed, node, request).refusal == "InvalidMessageError"


def test_a_request_about_another_session_is_refused(deployed: Deployed, node: Node) -> None:
    other = replace(deployed.agreement, session=bytes(16))
    assert answered(deployed, node, asking(deployed, Step.SETUP, agreement=other)).refusal == "AgreementMismatchError"


@pytest.mark.parametrize("step", [Step.ANNOUNCE, Step.TAKE_KEY, Step.COMMIT, Step.STORE, Step.HOLD])
def test_a_bank_refuses_steps_that_are_none_of_its_own(deployed: Deployed, node: Node, step: Step) -> None:
    assert answered(deployed, node, asking(deployed, step)).refusal == "PrivFedError"


def test_a_bank_with_another_key_in_its_folder_does_not_start(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, private=False)
    identity = deployed.folder("bank_0") / "identity.pem"
    identity.unlink()
    Identity.generate("bank_0").save(identity)
    with pytest.raises(AgreementMismatchError, match="of nobody whom the agreement pins"):
        Node(deployed.folder("bank_0"))


def test_a_node_answers_one_request_at_a_time(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, private=False)
    with Node(deployed.folder("bank_0")) as node:
        party: Any = node._party
        real, inside, most = party.answer, [], []

        def slow(request: Request) -> Any:
            inside.append(request)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()
            return real(request)

        party.answer = slow
        with ThreadPoolExecutor(max_workers=4) as pool:
            replies = list(pool.map(node.answer, [asking(deployed, Step.STATUS)] * 4))
    assert most == [1, 1, 1, 1]
    assert len(set(replies)) == 1


def test_a_request_that_arrives_after_a_later_round_or_attempt_began_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    first, second = (RoundContext(agreement=deployed.agreement, round=number, attempt=attempt) for number, attempt in ((2, 1), (3, 0)))
    # All with the same history: the rounds before were not held.
    late = {
        step: seal_request(Request(step=step, context=context), server_of(deployed))
        for step in (Step.SETUP, Step.COMMIT, Step.UPLOAD, Step.APPROVE)
        for context in (RoundContext(agreement=deployed.agreement, round=2, attempt=0), first)
    }
    for begun in (first, second):
        with Node(deployed.folder("bank_0")) as node:
            assert answered(deployed, node, seal_request(Request(step=Step.SETUP, context=begun), server_of(deployed))).refusal == ""
    with Node(deployed.folder("bank_0")) as node:
        spent = node._party.epsilon
        assert {answered(deployed, node, request).refusal for request in late.values()} == {"RoundMismatchError"}
        assert node._party.epsilon == spent
        assert answered(deployed, node, seal_request(Request(step=Step.UPLOAD, context=second), server_of(deployed))).refusal == ""


def test_an_upload_that_is_asked_for_without_a_setup_makes_everything_earlier_late_too(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)

    def asked(number: int, attempt: int) -> bytes:
        context = RoundContext(agreement=deployed.agreement, round=number, attempt=attempt)
        return seal_request(Request(step=Step.UPLOAD, context=context), server_of(deployed))

    with Node(deployed.folder("bank_0")) as node:
        assert answered(deployed, node, asked(3, 1)).refusal == ""
        spent = node._party.epsilon
    with Node(deployed.folder("bank_0")) as node:
        assert {answered(deployed, node, asked(*late)).refusal for late in ((3, 0), (2, 7), (0, 0))} == {"RoundMismatchError"}
        assert node._party.epsilon == spent


def test_a_damaged_note_of_what_was_asked_last_is_refused(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, private=False)
    for text in ("", "[]", '{"round": -1, "attempt": 0}', '{"round": 1}', '{"round": "1", "attempt": 0}'):
        (deployed.folder("bank_0") / "asked.json").write_text(text)
        with pytest.raises(DamagedFileError, match=r"asked\.json"):
            Node(deployed.folder("bank_0"))


def test_a_damaged_record_of_rounds_is_refused(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, private=False)
    for line in ('{"begun": {}}', '{"opened": {}}', '{"opened": 3}', '{"opened": {"round": "1"}}', '{"opened": {"round": -1}}', "[]"):
        (deployed.folder("bank_0") / "rounds.jsonl").write_text(f"{line}\n")
        with pytest.raises(DamagedFileError, match=r"rounds\.jsonl"):
            Node(deployed.folder("bank_0"))


def test_two_nodes_do_not_work_in_one_folder_and_a_closed_one_answers_nothing(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, private=False)
    node = Node(deployed.folder("bank_0"))
    with pytest.raises(FolderInUseError):
        Node(deployed.folder("bank_0"))
    node.close()
    node.close()
    with pytest.raises(FolderInUseError):
        node.answer(b"")
    Node(deployed.folder("bank_0")).close()


@pytest.mark.parametrize(("file", "mode"), [("site.py", 0o622), ("agreement.json", 0o666), ("identity.pem", 0o640), ("shared.key", 0o644)])
def test_a_file_that_others_may_touch_is_not_used(tmp_path: Path, file: str, mode: int) -> None:
    deployed = deploy(tmp_path, private=False)
    (deployed.folder("bank_0") / file).chmod(mode)
    with pytest.raises(PermissionError, match=re.escape(file)):
        Node(deployed.folder("bank_0"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("del client", "site.py to define client"),
        ("del model", "site.py to define model"),
        ("client = lambda: 3", "client\\(\\) to return a Client, got int"),
    ],
)
def test_a_site_file_that_lacks_what_it_must_define_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    deployed = deploy(tmp_path, private=False)
    site = deployed.folder("bank_0") / "site.py"
    site.write_text(site.read_text() + f"\n{line}\n")
    with pytest.raises(ValueError, match=reason):
        Node(deployed.folder("bank_0"))


def test_a_rule_that_is_not_the_agreed_one_is_refused(tmp_path: Path) -> None:
    from privfed.aggregation.robust import GeometricMedian
    from privfed.he.product_params import ProductParams

    terms: dict[str, Any] = {"private": False, "params": ProductParams.exact(), "rule": GeometricMedian()}
    other = """
    from privfed.aggregation.robust import NormBound

    def rule():
        return NormBound(max_norm=0.3)
    """
    deployed = deploy(tmp_path / "other", **terms, rule_file=other)
    with pytest.raises(AgreementMismatchError, match="agree on one"):
        Node(deployed.folder("bank_0"))
    deployed = deploy(tmp_path / "none", **terms, rule_file="RULE = 3")
    with pytest.raises(ValueError, match=r"expected rule\.py to define rule\(\)"):
        Node(deployed.folder("bank_0"))
    (deployed.folder("bank_0") / "rule.py").chmod(0o622)
    with pytest.raises(PermissionError):
        Node(deployed.folder("bank_0"))


def test_a_stale_round_is_refused_and_nothing_is_trained_or_charged_for_it(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    old: list[bytes] = []

    class Recording(LocalExchange):
        def _answer(self, name: str, data: bytes) -> bytes | None:
            if name == "bank_0":
                old.append(data)
            return super()._answer(name, data)

    with Recording(deployed) as exchange:
        coordinate(deployed.folder(SERVER), exchange, rounds=2)
        node = exchange.nodes["bank_0"]
        before = deployed.state("bank_0").values.values.copy()
        spent = node._party.epsilon
        # An old opening is settled already, and says so; nothing else of an old round is done again.
        refusals = {Step(request[9]): answered(deployed, node, request).refusal for request in old}
        forged = seal_request(
            Request(step=Step.UPLOAD, context=RoundContext(agreement=deployed.agreement, round=2, attempt=5)), server_of(deployed)
        )
        assert answered(deployed, node, forged).refusal == "HistoryMismatchError"
        assert node._party.epsilon == spent
    told = dict.fromkeys((Step.SETUP, Step.UPLOAD, Step.APPROVE), "HistoryMismatchError")
    assert refusals == told | {Step.STATUS: "", Step.OPEN: ""}
    assert (deployed.state("bank_0").values.values == before).all()


def test_a_bank_that_does_not_open_an_aggregate_says_so_and_not_why(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, private=False, count=4)
    seen: list[Answer] = []

    def fault(name: str, step: Step, number: int, data: bytes, honest: Any) -> bytes | None:
        if (name, step) != ("bank_3", Step.OPEN):
            return honest()
        request = open_request(data, deployed.agreement)
        worse = bytearray(request.payload)
        worse[-1] ^= 1
        asked = seal_request(replace(request, payload=bytes(worse)), server_of(deployed))
        reply = exchange.nodes[name].answer(asked)
        seen.append(open_answer(reply, asked, deployed.agreement.roster.client(name), agreement=deployed.agreement))
        return None

    with LocalExchange(deployed, fault=fault) as exchange:
        coordinate(deployed.folder(SERVER), exchange, rounds=1)
    (answer,) = seen
    assert (answer.refusal, answer.facts) == ("OpeningRefusedError", {})
    assert answer.payload
    (kept,) = [event for event in events(deployed, "bank_3") if event["event"] == "refused"]
    assert kept["kind"] == "InvalidMessageError"


# Wall-clock times, whose digits would now and then be those of a weight.
_TIMES = re.compile(
    r'"seconds": (\{[^}]*\}|[0-9.e-]+)|"name": "seconds",\s*"label": "\w+",\s*"value": [0-9.e-]+|privfed_seconds_total\{[^}]*\} [0-9.e-]+'
)


def test_every_party_keeps_a_record_of_rounds_metrics_and_events_without_private_values(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, keys=EscrowKey.generate(), params=CkksParams.escrow())
    with LocalExchange(deployed) as exchange:
        records = coordinate(deployed.folder(SERVER), exchange, rounds=2).rounds
    values = deployed.state("bank_0").values.values
    weights = {f"{abs(value):.8g}"[:7] for value in values if abs(value) > 1e-4}
    assert any(part in json.dumps(values.tolist()) for part in weights)
    for name in (*deployed.names, HOLDER, SERVER):
        folder = deployed.folder(name)
        texts = [(folder / file).read_text() for file in ("events.jsonl", "rounds.jsonl", "metrics.json", "metrics.prom")]
        assert not any(part in _TIMES.sub("", text) for text in texts for part in weights)
        assert all((folder / file).stat().st_mode & 0o077 == 0 for file in ("events.jsonl", "rounds.jsonl", "metrics.json"))
        metrics = {(entry["name"], entry["label"]): entry["value"] for entry in json.loads(texts[2])["metrics"]}
        assert metrics["rounds_held", ""] == 2
        assert f'privfed_rounds_held_total{{party="{name}"}} 2' in texts[3]
        for line in texts[3].splitlines():
            assert re.fullmatch(r'# (HELP|TYPE) privfed_\w+ .+|privfed_\w+\{party="[\w.]+"(,of="\w+")?\} [0-9.e+-]+', line)
        assert {"time", "party", "event"} <= json.loads(texts[0].splitlines()[0]).keys()
    opened = [json.loads(line)["opened"] for line in (deployed.folder("bank_1") / "rounds.jsonl").read_text().splitlines()]
    assert [entry["coefficients"] for entry in opened] == [dict(record.coefficients) for record in records]
    assert opened[0]["epsilon"] < opened[1]["epsilon"]


_BLOCKED = """
    import sys
    for module in {blocked}:
        sys.modules[module] = None
    {code}
    loaded = sorted(name for name in sys.modules if sys.modules[name] is not None and name.split(".")[0] in ("torch", "opacus"))
    print(loaded)
"""
_TORCH = ("torch", "opacus", "privfed.training")
_SECRET = tuple(f"privfed.he.{name}" for name in ("secret", "product_secret", "threshold_secret", "escrow_secret", "_seal_secret", "tags"))


def test_a_coordinator_needs_neither_torch_nor_the_secret_half_of_the_encryption(tmp_path: Path) -> None:
    deployed = deploy(tmp_path)
    code = textwrap.dedent(f"""
        from pathlib import Path
        from privfed.engines.coordinator import coordinate
        from privfed.errors import CohortError
        class Nobody:
            def ask(self, requests, *, seconds):
                return {{}}
        try:
            coordinate(Path({str(deployed.folder(SERVER))!r}), Nobody(), rounds=1)
        except CohortError:
            pass
        else:
            raise SystemExit("a round was held with nobody")
    """)
    program = textwrap.dedent(_BLOCKED).format(
        blocked=(*_TORCH, *_SECRET, "privfed.protect", "privfed.keyholder", "privfed.keys"), code=code
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


def test_a_key_holder_needs_no_torch(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, keys=EscrowKey.generate(), params=CkksParams.escrow())
    request = tmp_path / "request"
    request.write_bytes(asking(deployed, Step.STATUS))
    code = textwrap.dedent(f"""
        from pathlib import Path
        from privfed.engines.node import Node
        with Node(Path({str(deployed.folder(HOLDER))!r})) as node:
            node.answer(Path({str(request)!r}).read_bytes())
    """)
    program = textwrap.dedent(_BLOCKED).format(blocked=_TORCH, code=code)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


def test_a_key_holder_keeps_no_upload_that_is_not_its_senders(tmp_path: Path) -> None:
    deployed = deploy(tmp_path, keys=EscrowKey.generate(), params=CkksParams.escrow())
    with Node(deployed.folder(HOLDER)) as node:
        for about, payload in (("bank_0", b"noise"), ("../bank_0", b"noise"), ("nobody", b"noise"), ("", b"")):
            assert answered(deployed, node, asking(deployed, Step.STORE, about=about, payload=payload)).refusal == "InvalidMessageError"
        assert answered(deployed, node, asking(deployed, Step.HOLD, payload=b"noise")).refusal == "PrivFedError"
        assert answered(deployed, node, asking(deployed, Step.UPLOAD)).refusal == "PrivFedError"
    assert list((deployed.folder(HOLDER) / "state" / "uploads").iterdir()) == []


def test_what_runs_of_site_py_is_what_was_checked_and_not_what_takes_its_place_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.py"
    site.write_text("from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass Mine:\n    x: int\n")
    site.chmod(0o600)
    real = site_code.read_pinned

    def reading(path: Path, *, most: int) -> bytes:
        code = real(path, most=most)
        path.write_text("Planted = None\n")
        path.chmod(0o666)
        return code

    monkeypatch.setattr(site_code, "read_pinned", reading)
    names = site_code.run_site(tmp_path)
    assert (names["__name__"], names["__file__"]) == ("privfed_site", str(site))
    assert names["Mine"](x=3).x == 3
    assert "Planted" not in names
    with pytest.raises(PermissionError):
        site_code.run_site(tmp_path)


def test_a_site_py_that_is_too_long_is_refused_and_not_cut_off(tmp_path: Path) -> None:
    site = tmp_path / "site.py"
    site.write_text("X = 1\n" + "#" * 2**20)
    site.chmod(0o600)
    with pytest.raises(ValueError, match=r"expected site.py to hold at most 1048576 bytes, got more; nothing was done"):
        site_code.run_site(tmp_path)
    with pytest.raises(ValueError, match="at most"):
        site_code.check_site(tmp_path)

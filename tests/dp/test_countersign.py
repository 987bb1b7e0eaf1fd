"""A ledger that was set back is refused by those who saw it, and by nobody else."""

import json
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privfed.dp.countersign import HeadMemory, HeadStatement, countersigned, hashes_of, read_statement, record, state_head
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import Budget, GaussianRelease
from privfed.errors import InvalidMessageError, LedgerError, LedgerTamperedError
from privfed.identity import Identity
from privfed.table import Table

BUDGET = Budget(epsilon=1.0, delta=1e-5)
EVENT = GaussianRelease(noise_multiplier=40.0)
NAMES = ("bank_a", "bank_b", "bank_c")


def context_of(number: int) -> bytes:
    return sha256(f"round {number}".encode()).digest()


@dataclass
class Bank:
    """A bank with everything that it has on disk in one folder."""

    folder: Path
    identity: Identity
    ledger: Ledger = field(init=False)
    memory: HeadMemory = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.open()

    def open(self) -> None:
        self.ledger = Ledger.open(self.folder / "privacy.ledger", population=self.identity.name, budget=BUDGET)
        self.memory = HeadMemory(self.folder / "heads.sqlite")

    def backup(self, to: Path) -> None:
        self.ledger.close()
        shutil.copytree(self.folder, to)
        self.open()

    def restore(self, copy: Path) -> None:
        """Puts back *every* file."""
        self.ledger.close()
        shutil.rmtree(self.folder)
        shutil.copytree(copy, self.folder)
        self.open()

    def spend(self, number: int, attempt: int = 0) -> None:
        self.ledger.reserve(EVENT, session=b"session", round=number, attempt=attempt)

    def state(self, number: int, peers: tuple[str, ...]) -> bytes:
        return state_head(self.ledger, self.identity, context=context_of(number), peers=peers)


class Consortium:
    def __init__(self, folder: Path) -> None:
        self.banks = {name: Bank(folder / name, Identity.generate(name)) for name in NAMES}

    def hold(self, number: int) -> None:
        """What each round does with the ledgers."""
        for bank in self.banks.values():
            bank.spend(number)
        for bank in self.banks.values():
            self.show(bank, number)

    def show(self, bank: Bank, number: int) -> None:
        peers = [peer for peer in self.banks.values() if peer is not bank]
        statement = bank.state(number, tuple(peer.identity.name for peer in peers))
        answers = [(peer.identity.public, self.ask(peer, bank, statement, number)) for peer in peers]
        record(bank.ledger, answers, shown={bank.identity.name: statement}, owner=bank.identity.public, context=context_of(number))

    @staticmethod
    def ask(peer: Bank, owner: Bank, statement: bytes, number: int) -> bytes:
        stated = read_statement(statement, owner=owner.identity.public, population=owner.identity.name, context=context_of(number))
        return peer.memory.countersign([stated], signer=peer.identity)

    def close(self) -> None:
        for bank in self.banks.values():
            bank.ledger.close()


@pytest.fixture
def consortium(tmp_path: Path) -> Iterator[Consortium]:
    made = Consortium(tmp_path)
    yield made
    made.close()


# --- setting back -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds_after", [0, 1, 5])
def test_restoring_every_local_file_to_an_older_state_is_refused_by_the_peers_in_the_next_round(
    consortium: Consortium, tmp_path: Path, rounds_after: int
) -> None:
    bank = consortium.banks["bank_a"]
    consortium.hold(0)
    bank.backup(tmp_path / "copy")
    consortium.hold(1)
    spent = bank.ledger.spent()
    bank.restore(tmp_path / "copy")
    bank.ledger.verify()  # nothing at the bank can tell
    assert bank.ledger.spent() < spent
    for number in range(1, 2 + rounds_after):  # as many rows as before, or more
        bank.spend(number, attempt=7)
    memories = [consortium.banks[name].memory.known_rows("bank_a", "bank_a") for name in ("bank_b", "bank_c")]
    statement = bank.state(2, ("bank_b", "bank_c"))
    for name in ("bank_b", "bank_c"):
        with pytest.raises(LedgerTamperedError, match="does not extend the one that was seen before.*nothing was countersigned"):
            consortium.ask(consortium.banks[name], bank, statement, 2)
    assert memories == [consortium.banks[name].memory.known_rows("bank_a", "bank_a") for name in ("bank_b", "bank_c")]


def test_the_same_charge_made_again_after_setting_back_is_another_row(consortium: Consortium, tmp_path: Path) -> None:
    bank = consortium.banks["bank_a"]
    consortium.hold(0)
    bank.backup(tmp_path / "copy")
    bank.spend(1)
    consortium.show(bank, 1)
    rows = len(bank.ledger.rows())
    bank.restore(tmp_path / "copy")
    bank.spend(1)  # the same event at the same place, perhaps in the same second
    bank.ledger.record_countersignatures(rows=1, context=bytes(32), start=0, signature=b"", hashes=(), signatures={})
    assert len(bank.ledger.rows()) == rows
    with pytest.raises(LedgerTamperedError):
        consortium.ask(consortium.banks["bank_b"], bank, bank.state(2, ("bank_b",)), 2)


def test_a_new_ledger_for_the_same_population_is_refused(consortium: Consortium) -> None:
    bank = consortium.banks["bank_a"]
    consortium.hold(0)
    bank.ledger.close()
    shutil.rmtree(bank.folder)
    bank.folder.mkdir()
    bank.open()
    for number in range(10):
        bank.spend(number)
    with pytest.raises(LedgerTamperedError):
        consortium.ask(consortium.banks["bank_b"], bank, bank.state(1, ("bank_b", "bank_c")), 1)


def test_a_peer_that_was_set_back_itself_is_caught_by_the_other_and_one_memory_is_enough(consortium: Consortium, tmp_path: Path) -> None:
    bank, accomplice, honest = consortium.banks.values()
    consortium.hold(0)
    for party in (bank, accomplice):
        party.backup(tmp_path / f"copy of {party.identity.name}")
    consortium.hold(1)
    for party in (bank, accomplice):
        party.restore(tmp_path / f"copy of {party.identity.name}")
        party.spend(2)
    statement = bank.state(2, ("bank_b", "bank_c"))
    consortium.ask(accomplice, bank, statement, 2)
    with pytest.raises(LedgerTamperedError):
        consortium.ask(honest, bank, statement, 2)
    with pytest.raises(LedgerTamperedError):
        consortium.ask(honest, accomplice, accomplice.state(2, ("bank_c",)), 2)


def test_a_statement_that_leaves_out_what_a_peer_saw_is_refused(consortium: Consortium) -> None:
    bank = consortium.banks["bank_a"]
    consortium.hold(0)
    rows = len(bank.ledger.rows())
    bank.ledger.record_countersignatures(rows=rows, context=bytes(32), start=0, signature=b"", hashes=(), signatures={"bank_b": bytes(64)})
    with pytest.raises(LedgerError, match=r"is shown from row \d+ on only; nothing was countersigned"):
        consortium.ask(consortium.banks["bank_b"], bank, bank.state(1, ("bank_b",)), 1)


# --- honest rounds ------------------------------------------------------------------------------------------------------------------


def test_honest_ledgers_are_countersigned_in_every_round_also_after_restarts(consortium: Consortium) -> None:
    for number in range(4):
        consortium.hold(number)
        for bank in consortium.banks.values():
            bank.ledger.close()
            bank.open()
    bank = consortium.banks["bank_a"]
    text = bank.ledger.text()
    assert text.count("countersigned by bank_b, bank_c") == 4
    assert bank.ledger.countersigned("bank_b") == len(bank.ledger.rows()) - 1
    assert bank.ledger.countersigned("bank_a") == 0


def test_a_peer_that_missed_rounds_or_joins_late_is_shown_what_it_did_not_see(consortium: Consortium) -> None:
    bank, regular, late = consortium.banks.values()
    for number in range(3):
        bank.spend(number)
        statement = bank.state(number, ("bank_b",))
        answers = [(regular.identity.public, consortium.ask(regular, bank, statement, number))]
        record(bank.ledger, answers, shown={bank.identity.name: statement}, owner=bank.identity.public, context=context_of(number))
    assert late.memory.known_rows("bank_a", "bank_a") is None
    consortium.ask(late, bank, bank.state(3, ("bank_b", "bank_c")), 3)
    assert late.memory.known_rows("bank_a", "bank_a") == len(bank.ledger.rows())


def test_an_answer_that_was_lost_may_be_asked_for_again(consortium: Consortium) -> None:
    bank, peer, _ = consortium.banks.values()
    bank.spend(0)
    statement = bank.state(0, ("bank_b",))
    first = consortium.ask(peer, bank, statement, 0)  # the owner crashes before it records it
    bank.ledger.close()
    bank.open()
    assert consortium.ask(peer, bank, statement, 0) == first
    bank.spend(0, attempt=1)
    consortium.ask(peer, bank, bank.state(1, ("bank_b",)), 1)


def test_statements_tell_nothing_about_rows(consortium: Consortium) -> None:
    bank = consortium.banks["bank_a"]
    for number in range(3):
        bank.spend(number)
    statement = bank.state(0, ("bank_b",))
    assert b"session" not in statement
    assert b"noise" not in statement
    assert len(statement) == 8 + 32 + 4 * 32 + 64
    read = read_statement(statement, owner=bank.identity.public, population="bank_a", context=context_of(0))
    assert len(set(read.links)) == 4  # also of rows that say the same
    assert (read.rows, read.head) == (4, bank.ledger.head)


# --- bytes --------------------------------------------------------------------------------------------------------------------------


def ask(bank: Bank, peer: Bank, statement: bytes, **changes: object) -> bytes:
    usual: dict[str, object] = {"owner": bank.identity.public, "population": "bank_a", "context": context_of(0)}
    signer = changes.pop("signer", peer.identity)
    return peer.memory.countersign([read_statement(statement, **(usual | changes))], signer=signer)  # type: ignore[arg-type]


def test_a_statement_of_another_party_population_or_round_is_not_countersigned(consortium: Consortium) -> None:
    bank, peer, other = consortium.banks.values()
    bank.spend(0)
    statement = bank.state(0, ("bank_b",))
    with pytest.raises(InvalidMessageError):
        ask(bank, peer, statement, owner=other.identity.public)
    with pytest.raises(InvalidMessageError):
        ask(bank, peer, statement, population="other data")
    with pytest.raises(InvalidMessageError):
        ask(bank, peer, statement, context=context_of(1))
    impostor = Identity.generate("bank_a")
    forged = state_head(bank.ledger, impostor, context=context_of(0), peers=("bank_b",))
    with pytest.raises(InvalidMessageError):
        ask(bank, peer, forged)
    lent = Identity(name="bank_x", key=bank.identity._key)  # the right key, another name
    with pytest.raises(InvalidMessageError):
        ask(bank, peer, state_head(bank.ledger, lent, context=context_of(0), peers=("bank_b",)))
    assert peer.memory.known_rows("bank_a", "bank_a") is None
    ask(bank, peer, statement)


def read(statement: bytes, bank: Bank) -> HeadStatement:
    return read_statement(statement, owner=bank.identity.public, population="bank_a", context=context_of(0))


@given(position=st.integers(0, 10_000), change=st.integers(1, 255), cut=st.booleans())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_or_cut_statement_is_not_valid(one: tuple[Bank, bytes], position: int, change: int, *, cut: bool) -> None:
    bank, statement = one
    position %= len(statement)
    spoiled = bytearray(statement)
    spoiled[position] ^= change
    with pytest.raises(InvalidMessageError):
        read(statement[:position] if cut else bytes(spoiled), bank)


@pytest.fixture
def one(consortium: Consortium) -> tuple[Bank, bytes]:
    bank = consortium.banks["bank_a"]
    bank.spend(0)
    return bank, bank.state(0, ("bank_b",))


@pytest.mark.parametrize("spoil", [lambda body: body + b"more", lambda body: body[:-1], lambda body: b"", lambda body: body[:8]])
def test_authentic_bytes_that_are_no_statement_are_not_valid(one: tuple[Bank, bytes], spoil: Callable[[bytes], bytes]) -> None:
    bank, statement = one
    head = b"privfed ledger head v2\0\x06bank_a\0\x06bank_a" + context_of(0)

    def signed(body: bytes) -> bytes:
        return body + bank.identity.sign(head + body)

    body = statement[:-64]
    assert read(signed(body), bank) == read(statement, bank)
    with pytest.raises(InvalidMessageError):
        read(signed(spoil(body)), bank)


def test_a_huge_statement_is_dropped_before_its_signature_is_looked_at(one: tuple[Bank, bytes]) -> None:
    class Unasked:
        name = "bank_a"

        def verify(self, message: bytes, signature: bytes) -> None:
            raise AssertionError

    with pytest.raises(InvalidMessageError):
        read_statement(bytes(8 + 32 * 1_000_002 + 64), owner=Unasked(), population="bank_a", context=context_of(0))  # type: ignore[arg-type]


def test_only_signatures_of_peers_under_this_head_are_recorded(one: tuple[Bank, bytes], consortium: Consortium) -> None:
    bank, statement = one
    peer = consortium.banks["bank_b"]
    where = {"shown": {"bank_a": statement}, "owner": bank.identity.public, "context": context_of(0)}
    answer = ask(bank, peer, statement)
    rows = bank.ledger.rows()
    for wrong in (bytes(64), peer.identity.sign(statement), consortium.banks["bank_c"].identity.sign(statement)):
        record(bank.ledger, [(peer.identity.public, wrong)], **where)
        assert bank.ledger.rows() == rows
    with pytest.raises(InvalidMessageError):  # the statement is about another ledger
        record(peer.ledger, [(peer.identity.public, answer)], **where)
    assert bank.ledger.rows() == rows
    record(bank.ledger, [(consortium.banks["bank_c"].identity.public, bytes(64)), (peer.identity.public, answer)], **where)
    assert bank.ledger.countersigned("bank_b") == len(rows)
    assert bank.ledger.countersigned("bank_c") == 0


@pytest.mark.parametrize(("context", "peers"), [(b"short", ("bank_b",)), (bytes(32), ())])
def test_a_head_is_stated_for_something_and_to_somebody(one: tuple[Bank, bytes], context: bytes, peers: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected a context"):
        state_head(one[0].ledger, one[0].identity, context=context, peers=peers)


# --- memory -------------------------------------------------------------------------------------------------------------------------


def test_a_head_is_remembered_before_it_is_signed(one: tuple[Bank, bytes], consortium: Consortium) -> None:
    class CrashError(Exception):
        pass

    class CrashingSigner:
        name, public = "bank_b", consortium.banks["bank_b"].identity.public

        def sign(self, message: bytes) -> bytes:
            raise CrashError

    bank, statement = one
    peer = consortium.banks["bank_b"]
    with pytest.raises(CrashError):
        ask(bank, peer, statement, signer=CrashingSigner())
    assert HeadMemory(peer.folder / "heads.sqlite").known_rows("bank_a", "bank_a") == 2


def test_memory_is_its_owners_and_survives(one: tuple[Bank, bytes], consortium: Consortium) -> None:
    bank, statement = one
    peer = consortium.banks["bank_b"]
    ask(bank, peer, statement)
    file = peer.folder / "heads.sqlite"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o660)
    with pytest.raises(PermissionError, match="chmod 600"):
        HeadMemory(file)
    file.chmod(0o600)
    assert HeadMemory(file).known_rows("bank_a", "bank_a") == 2
    connection = sqlite3.connect(file)
    assert connection.execute("SELECT count(*) FROM heads").fetchone() == (1,)
    connection.close()


def statements_of(consortium: Consortium, number: int, *names: str) -> list[HeadStatement]:
    """What some banks state of their ledgers in a round, as bank_c reads it."""
    banks = [consortium.banks[name] for name in names]
    return [
        read_statement(
            bank.state(number, ("bank_c",)), owner=bank.identity.public, population=bank.identity.name, context=context_of(number)
        )
        for bank in banks
    ]


def test_several_ledgers_are_countersigned_at_once_and_remembered_in_one_transaction(
    consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = consortium.banks["bank_c"]
    for name in ("bank_a", "bank_b"):
        consortium.banks[name].spend(0)
    stated = statements_of(consortium, 0, "bank_a", "bank_b")
    transactions: list[None] = []
    transaction = Table.transaction
    monkeypatch.setattr(Table, "transaction", lambda self: (transactions.append(None), transaction(self))[1])
    signature = peer.memory.countersign(stated, signer=peer.identity)
    assert len(transactions) == 1
    peer.identity.public.verify(countersigned(context_of(0), hashes_of({each.owner: each.data for each in stated})), signature)
    for statement in stated:
        assert peer.memory.known_rows(statement.owner, statement.population) == statement.rows


def test_a_party_signs_its_own_head_with_those_of_others_and_does_not_remember_it(consortium: Consortium) -> None:
    peer = consortium.banks["bank_b"]
    for name in ("bank_a", "bank_b"):
        consortium.banks[name].spend(0)
    stated = statements_of(consortium, 0, "bank_a", "bank_b")
    signature = peer.memory.countersign(stated, signer=peer.identity)
    peer.identity.public.verify(countersigned(context_of(0), hashes_of({each.owner: each.data for each in stated})), signature)
    assert peer.memory.known_rows("bank_a", "bank_a") == 2
    assert peer.memory.known_rows("bank_b", "bank_b") is None


def test_one_countersignature_holds_for_every_owner_and_for_no_other_set_of_heads(consortium: Consortium) -> None:
    peer = consortium.banks["bank_c"]
    for name in ("bank_a", "bank_b"):
        consortium.banks[name].spend(0)
    stated = statements_of(consortium, 0, "bank_a", "bank_b")
    shown = {statement.owner: statement.data for statement in stated}
    answers = [(peer.identity.public, peer.memory.countersign(stated, signer=peer.identity))]
    for name, own in shown.items():
        owner = consortium.banks[name]
        where = {"owner": owner.identity.public, "context": context_of(0)}
        rows = owner.ledger.rows()
        others = {other: statement for other, statement in shown.items() if other != name}
        exchanged = dict(zip(others, [own], strict=True))
        for other in ({name: own}, dict(reversed(shown.items())), shown | {"bank_c": own}, {name: own} | exchanged):
            record(owner.ledger, answers, shown=other, **where)
            assert owner.ledger.rows() == rows
        with pytest.raises(ValueError, match="expected the owner's statement among those of the round; nothing was recorded"):
            record(owner.ledger, answers, shown=others, **where)
        record(owner.ledger, answers, shown=shown, **where)
        assert owner.ledger.countersigned("bank_c") == len(rows)


def test_a_countersignature_is_for_one_round(one: tuple[Bank, bytes], consortium: Consortium) -> None:
    bank, statement = one
    peer = consortium.banks["bank_b"]
    hashes = hashes_of({"bank_a": statement})
    answer = ask(bank, peer, statement)
    peer.identity.public.verify(countersigned(context_of(0), hashes), answer)
    with pytest.raises(InvalidMessageError):
        peer.identity.public.verify(countersigned(context_of(1), hashes), answer)


def test_what_a_ledger_keeps_is_enough_to_verify_its_countersignatures(consortium: Consortium) -> None:
    consortium.hold(0)
    consortium.hold(1)
    bank = consortium.banks["bank_a"]
    bank.ledger.close()
    with sqlite3.connect(bank.folder / "privacy.ledger") as connection:
        kept = [json.loads(row) for (row,) in connection.execute("SELECT body FROM rows ORDER BY number")]
    row = [row for row in kept if row["kind"] == "countersign"][-1]
    assert row["start"] > 0
    hashes, context, start = [bytes.fromhex(text) for text in row["statements"]], bytes.fromhex(row["context"]), row["start"]
    with Ledger.read(bank.folder / "privacy.ledger") as ledger:
        links = ledger.links(start)[: row["rows"] - start]
        statement = start.to_bytes(8, "big") + ledger.head_of(start) + b"".join(links) + bytes.fromhex(row["signature"])
    stated = read_statement(statement, owner=bank.identity.public, population="bank_a", context=context)
    assert (stated.rows, stated.head.hex()) == (row["rows"], row["head"])
    assert hashes_of({"bank_a": statement})[0] in hashes
    assert set(row["by"]) == {"bank_b", "bank_c"}
    for name, signature in row["by"].items():
        consortium.banks[name].identity.public.verify(countersigned(context, hashes), bytes.fromhex(signature))


def test_what_a_ledger_keeps_of_a_countersignature_does_not_grow_with_the_rows_that_a_silent_peer_never_saw(consortium: Consortium) -> None:
    bank, peer = consortium.banks["bank_a"], consortium.banks["bank_b"]
    shown = list[int]()
    for number in range(12):
        bank.spend(number)
        statement = bank.state(number, ("bank_b", "bank_c"))
        answers = [(peer.identity.public, consortium.ask(peer, bank, statement, number))]
        record(bank.ledger, answers, shown={"bank_a": statement}, owner=bank.identity.public, context=context_of(number))
        shown.append(len(statement))
    assert shown[-1] > 3 * shown[0]
    bank.ledger.close()
    with sqlite3.connect(bank.folder / "privacy.ledger") as connection:
        kept = [len(row) for (row,) in connection.execute("SELECT body FROM rows ORDER BY number") if '"countersign"' in row]
    assert len(kept) == 12
    assert max(kept) - min(kept) <= 2  # digits of a number


@pytest.mark.parametrize("start", [2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_statement_of_more_rows_than_a_memory_can_keep_is_not_valid(one: tuple[Bank, bytes], start: int) -> None:
    bank, statement = one
    head = b"privfed ledger head v2\0\x06bank_a\0\x06bank_a" + context_of(0)
    body = start.to_bytes(8, "big") + statement[8:-64]
    with pytest.raises(InvalidMessageError):
        read(body + bank.identity.sign(head + body), bank)


def test_the_most_rows_of_a_statement_are_remembered(one: tuple[Bank, bytes], consortium: Consortium) -> None:
    bank, statement = one
    head = b"privfed ledger head v2\0\x06bank_a\0\x06bank_a" + context_of(0)
    body = (2**62 - 2).to_bytes(8, "big") + statement[8:-64]
    ask(bank, consortium.banks["bank_b"], body + bank.identity.sign(head + body))
    assert consortium.banks["bank_b"].memory.known_rows("bank_a", "bank_a") == 2**62


def test_nothing_is_remembered_of_statements_for_different_rounds(consortium: Consortium) -> None:
    peer = consortium.banks["bank_c"]
    for name in ("bank_a", "bank_b"):
        consortium.banks[name].spend(0)
    stated = [*statements_of(consortium, 0, "bank_a"), *statements_of(consortium, 1, "bank_b")]
    with pytest.raises(ValueError, match="too many values"):
        peer.memory.countersign(stated, signer=peer.identity)
    assert peer.memory.empty


def test_one_ledger_that_was_set_back_has_none_remembered(consortium: Consortium, tmp_path: Path) -> None:
    peer, honest, dishonest = (consortium.banks[name] for name in ("bank_c", "bank_a", "bank_b"))
    honest.spend(0)
    dishonest.backup(tmp_path / "copy")
    dishonest.spend(0)
    peer.memory.countersign(statements_of(consortium, 0, "bank_a", "bank_b"), signer=peer.identity)
    known = peer.memory.known_rows("bank_a", "bank_a")
    dishonest.restore(tmp_path / "copy")
    dishonest.spend(1)
    honest.spend(1)
    with pytest.raises(LedgerTamperedError):
        peer.memory.countersign(statements_of(consortium, 1, "bank_a", "bank_b"), signer=peer.identity)
    assert peer.memory.known_rows("bank_a", "bank_a") == known

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privfed.errors import KeyRefusedError
from privfed.identity import Identity
from privfed.keys.roster import Member, PinnedRoster, server_line
from tests.keys.conftest import BANKS, People, new_party


def text_of(roster: PinnedRoster) -> str:
    return "\n".join([server_line(roster.server), *(member.line for member in roster.members)]) + "\n"


def test_a_roster_survives_its_own_lines(roster: PinnedRoster) -> None:
    again = PinnedRoster.parse(text_of(roster))
    assert again == roster
    assert again.fingerprint == roster.fingerprint
    assert again.parties.digest == roster.parties.digest


def test_order_spaces_comments_and_line_ends_do_not_matter(roster: PinnedRoster) -> None:
    lines = text_of(roster).splitlines()
    shuffled = "# who is in\r\n\r\n" + "\r\n".join(f"  {line.replace(' ', '   ')} " for line in reversed(lines))
    assert PinnedRoster.parse(shuffled).fingerprint == roster.fingerprint


def test_the_parties_of_a_session_are_those_of_the_pinned_roster(roster: PinnedRoster) -> None:
    assert roster.parties.server == roster.server
    assert roster.parties.names == BANKS


def test_the_fingerprint_changes_with_every_name_and_every_key(people: People, roster: PinnedRoster) -> None:
    first, *others = roster.members
    stranger = new_party("bank_a").public
    changed = [
        PinnedRoster(server=Identity.generate("hub").public, members=roster.members),
        PinnedRoster(server=roster.server, members=tuple(others)),
        PinnedRoster(server=roster.server, members=(*roster.members, people["bank_f"].public)),
        PinnedRoster(server=roster.server, members=(replace(first, encryption_key=stranger.encryption_key), *others)),
        PinnedRoster(server=roster.server, members=(replace(first, identity=stranger.identity), *others)),
        PinnedRoster(server=roster.server, members=(new_party("bank_z").public, *others)),
    ]
    assert len({roster.fingerprint, *(each.fingerprint for each in changed)}) == 7
    assert [len(group) for group in roster.fingerprint.split()] == [8] * 8


def test_a_member_s_fingerprint_covers_its_name_and_both_keys(roster: PinnedRoster) -> None:
    member, other = roster.members[:2]
    renamed = replace(member, identity=replace(member.identity, name="bank_z"))
    assert len({member.fingerprint, renamed.fingerprint, replace(member, encryption_key=other.encryption_key).fingerprint}) == 3


@pytest.mark.parametrize("twin", ["Bank_A", "bank-a", "bank.a", "BANK__A"])
def test_names_that_people_would_take_for_each_other_are_refused(people: People, twin: str) -> None:
    with pytest.raises(ValueError, match="differ in more than case"):
        PinnedRoster(server=people.server, members=(people["bank_a"].public, new_party(twin).public))
    with pytest.raises(ValueError, match="differ in more than case"):
        PinnedRoster(server=Identity.generate(twin).public, members=(people["bank_a"].public,))


def test_a_key_that_occurs_twice_is_refused(people: People) -> None:
    a, b = people["bank_a"].public, people["bank_b"].public
    with pytest.raises(ValueError, match="every encryption key once"):
        PinnedRoster(server=people.server, members=(a, replace(b, encryption_key=a.encryption_key)))
    with pytest.raises(ValueError, match="every public key once"):
        PinnedRoster(server=people.server, members=(a, replace(b, identity=replace(b.identity, public_key=a.identity.public_key))))


def test_a_roster_without_clients_is_refused(people: People) -> None:
    with pytest.raises(ValueError, match="at least one client"):
        PinnedRoster(server=people.server, members=())


# RFC 7748, section 6.1: an all-zero shared secret. Orders 1, 2, 4 and 8 of the curve or its twist.
SMALL_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
]


@pytest.mark.parametrize("key", [*SMALL_ORDER, bytes(31), bytes(33)])
def test_a_key_to_which_everybody_could_open_messages_is_refused(people: People, key: bytes) -> None:
    with pytest.raises(ValueError, match="not of small order"):
        Member(identity=people["bank_a"].public.identity, encryption_key=key)


def test_the_server_and_strangers_are_no_members(roster: PinnedRoster) -> None:
    assert roster.member("bank_b").name == "bank_b"
    with pytest.raises(KeyRefusedError, match="the server, which never gets a key"):
        roster.member("hub")
    with pytest.raises(KeyRefusedError, match="not in the roster"):
        roster.member("bank_f")


def test_a_line_whose_keys_were_exchanged_is_refused(roster: PinnedRoster) -> None:
    text = text_of(roster)
    for ours, theirs in ((0, 1), (1, 0)):
        member, other = roster.members[ours], roster.members[theirs]
        for key, another in (
            (member.encryption_key, other.encryption_key),
            (member.identity.public_key, other.identity.public_key),
        ):
            with pytest.raises(ValueError, match=r"the fingerprint does not belong to the keys; nothing was done; ask 'bank_."):
                PinnedRoster.parse(text.replace(key.hex(), another.hex(), 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text.replace("server", "client", 1),
        lambda text: text.replace("client", "server"),
        lambda text: "\n".join(text.splitlines()[1:]),  # no server
        lambda text: text + text.splitlines()[0],  # two of them
        lambda text: text.upper(),
        lambda text: text.replace("bank_a", "bank_A"),
        lambda text: text.replace("bank_a", "bänk_a"),
        lambda text: text.rstrip() + " more",
        lambda text: text.rstrip()[:-9],
        lambda text: "member bank_a",
        lambda text: "#" * 1_000_001,
    ],
)
def test_what_is_no_roster_is_refused(roster: PinnedRoster, change) -> None:
    with pytest.raises(ValueError, match=r"expected|fingerprint"):
        PinnedRoster.parse(change(text_of(roster)))


def test_a_roster_file_that_others_may_write_is_refused(tmp_path: Path, roster: PinnedRoster) -> None:
    path = tmp_path / "roster.txt"
    path.write_text(text_of(roster))
    path.chmod(0o644)
    assert PinnedRoster.load(path) == roster
    path.chmod(0o664)
    with pytest.raises(PermissionError, match="writable by its owner only"):
        PinnedRoster.load(path)


def test_a_file_of_other_bytes_is_no_roster(tmp_path: Path) -> None:
    path = tmp_path / "roster.txt"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"expected a roster in roster\.txt"):
        PinnedRoster.load(path)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_changed_roster_is_another_one_or_none(people: People, roster: PinnedRoster, data: st.DataObject) -> None:
    text = text_of(people.roster(["bank_a", "bank_b"]))
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + data.draw(st.characters(codec="utf-8")) + text[place + data.draw(st.integers(0, 3)) :]
    try:
        parsed = PinnedRoster.parse(changed)
    except ValueError:
        return
    # What still reads says the same: the change was a space, the end of a line or a comment.
    assert parsed.fingerprint == people.roster(["bank_a", "bank_b"]).fingerprint

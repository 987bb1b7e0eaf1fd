"""`privfed keys`: who the parties are, the key that the clients share, and a search for keys that lie where they should not."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privfed.cli.arguments import AsJson, at_least, empty_folder
from privfed.cli.refusals import SUGGEST_COMMANDS
from privfed.cli.terminal import print_json, printable
from privfed.errors import KeyRefusedError

if TYPE_CHECKING:
    from privfed.keys.chain import ChainFacts, KeyChain
    from privfed.keys.roster import PinnedRoster

_FEWEST = 2
FOUND = 3
"""Exit code of a scan that found a secret key."""

app = typer.Typer(
    no_args_is_help=True, suggest_commands=SUGGEST_COMMANDS, help="Identities, the key that the clients share, and where keys lie around."
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="Your folder, from privfed keys init.", readable=False)]
RosterFile = Annotated[
    Path, typer.Option("--roster", metavar="FILE", show_default=False, help="The pinned roster: everybody's line.", readable=False)
]
KeyFile = Annotated[
    Path, typer.Option("--key", metavar="FILE", show_default=False, help="Your file with the key of this session.", readable=False)
]
Out = Annotated[Path, typer.Option(metavar="DIR", show_default=False, help="New or empty folder for a message to each other client.")]


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Your name in the roster.")],
    *,
    server: Annotated[bool, typer.Option("--server", help="For the server: it gets no key to which anything could be encrypted.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="New folder for your keys; left out, NAME.", show_default=False)] = None,
) -> None:
    """Make your keys, and print your line of the roster.

    The folder has mode 0700, its files 0600; what is there already is never overwritten. The line is public: send it to everybody, and
    read its fingerprint, the last 8 groups, to them over the phone.

    ```
    privfed keys init bank_a
    privfed keys init hub --server
    ```
    """
    from privfed.keys.party import PUBLIC_LINE, Party, create_server  # noqa: PLC0415 # --help must not wait for the cryptography
    from privfed.keys.roster import server_line  # noqa: PLC0415

    folder = Path(name) if out is None else out
    if (folder / PUBLIC_LINE).exists():
        raise KeyRefusedError(
            f"your keys are there already, in {folder}; nothing was made or overwritten; privfed keys show {folder} prints the fingerprint"
        )
    line = server_line(create_server(folder, name=name)) if server else Party.create(folder, name=name).public.line
    typer.echo(line)
    typer.echo(f"Your keys are in {folder}. The line above is for everybody; nothing else leaves this machine.", err=True)


@app.command()
def wrap(folder: Folder, *, roster: RosterFile, key: KeyFile, out: Out, as_json: AsJson = False) -> None:
    """Encrypt the key that the clients share to each of the others; make it first, if the file is not there.

    One client does this, once. Each message in DIR opens for one client alone, whatever way it takes. The server gets none.

    ```
    privfed keys wrap bank_a --roster roster.txt --key fraud.key --out wraps
    ```
    """
    from privfed.keys.chain import KeyChain  # noqa: PLC0415 # --help must not wait for SEAL
    from privfed.keys.roster import PinnedRoster  # noqa: PLC0415

    pinned = PinnedRoster.load(roster)
    new = not key.exists()
    chain = KeyChain.generate(pinned) if new else KeyChain.load(key, roster=pinned)
    _hand_out(chain, folder, pinned, key=key if new else None, out=out, as_json=as_json)


@app.command()
def unwrap(
    folder: Folder,
    message: Annotated[
        Path, typer.Argument(metavar="MESSAGE", show_default=False, help="What privfed keys wrap made for you.", readable=False)
    ],
    *,
    roster: RosterFile,
    key: KeyFile,
    epoch: Annotated[
        int | None,
        typer.Option(
            help="The epoch that it must be. Left out: 1, or the one after that of your key file.",
            show_default=False,
            callback=at_least("--epoch", 1),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a message with the shared key, open it, and put the key into your file.

    The signature is checked against the pinned roster before anything is opened. Refused are messages for others, of another roster or
    session, and of any other epoch: an old message cannot bring an old key back. A key file of the epoch before is replaced.

    ```
    privfed keys unwrap bank_b bank_b.wrap --roster roster.txt --key fraud.key
    ```
    """
    from privfed.keys.chain import read_facts  # noqa: PLC0415 # --help must not wait for SEAL
    from privfed.keys.party import Party  # noqa: PLC0415
    from privfed.keys.roster import PinnedRoster  # noqa: PLC0415
    from privfed.keys.wrap import read_wrap  # noqa: PLC0415
    from privfed.keys.wrap import unwrap as open_wrap  # noqa: PLC0415

    held = read_facts(key) if key.exists() else None
    expected = epoch or (1 if held is None else held.epoch + 1)
    chain = open_wrap(read_wrap(message), recipient=Party.load(folder), roster=PinnedRoster.load(roster), epoch=expected, held=held)
    chain.save(key)
    if as_json:
        print_json(_facts(chain.facts))
        return
    _print(_described(chain.facts))
    if held is not None:
        typer.echo(f"The key of epoch {held.epoch} is erased from {key}.")
    typer.echo("Compare the key's fingerprint with the others: it is the same for all.")
    typer.echo(f"{folder / 'encryption.pem'} is not needed until the next rotation: keep it elsewhere, it opens the message again.")


@app.command()
def rotate(folder: Folder, *, roster: RosterFile, key: KeyFile, out: Out, as_json: AsJson = False) -> None:
    """Make a fresh key of the next epoch, for a new roster or after a theft, and encrypt it to each of the other clients.

    One client does this, once. The key in your file is replaced; what was not opened with it until now stays closed.

    ```
    privfed keys rotate bank_a --roster roster2.txt --key fraud.key --out wraps2
    ```
    """
    from privfed.keys.chain import KeyChain, read_facts  # noqa: PLC0415 # --help must not wait for SEAL
    from privfed.keys.roster import PinnedRoster  # noqa: PLC0415

    pinned = PinnedRoster.load(roster)
    _hand_out(KeyChain.generate(pinned, after=read_facts(key)), folder, pinned, key=key, out=out, as_json=as_json)


def _hand_out(chain: "KeyChain", folder: Path, roster: "PinnedRoster", *, key: Path | None, out: Path, as_json: bool) -> None:
    """Keeps a new key, and writes the messages for the other clients; nothing, if one of them is refused."""
    from privfed.files import create  # noqa: PLC0415
    from privfed.keys.party import Party  # noqa: PLC0415
    from privfed.keys.wrap import wrap as wrap_for  # noqa: PLC0415

    sender = Party.load(folder)
    if len(roster.members) < _FEWEST:
        raise KeyRefusedError(
            f"the roster has {_clients(len(roster.members))}, and a key is shared by {_FEWEST} or more; nothing was made or wrapped; put "
            "the lines of the others into it"
        )
    others = [member for member in roster.members if member.name != sender.name]
    messages = {f"{member.name}.wrap": wrap_for(chain, sender=sender, recipient=member, roster=roster) for member in others}
    empty_folder(out)
    if key is not None:
        chain.save(key)
    for name, message in messages.items():
        create(out / name, message)
    if as_json:
        print_json(_facts(chain.facts) | {"messages": [str(out / name) for name in messages]})
        return
    _print(_described(chain.facts))
    typer.echo(f"Send each client its own message from {out}: {', '.join(messages)}.")


@app.command()
def show(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", show_default=False, help="A roster, a key file, or a folder from init.", readable=False)
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Show what is public about a roster, a key file or a folder of keys: names and fingerprints to compare, the epoch.

    Keys that others than their owner may read, and rosters that others may write, are refused. No secret is shown. Rounds count from 1,
    in `--json` from 0.

    ```
    privfed keys show roster.txt
    privfed keys show fraud.key
    ```
    """
    from privfed.keys.chain import CHAIN_HEADER, read_facts, shared_key_fingerprint  # noqa: PLC0415 # --help must not wait for SEAL
    from privfed.keys.marks import SHARED_KEY_HEADER  # noqa: PLC0415
    from privfed.keys.party import read_public  # noqa: PLC0415
    from privfed.keys.roster import Member, PinnedRoster  # noqa: PLC0415

    if path.is_dir():
        public = read_public(path)
        facts = {"role": "client" if isinstance(public, Member) else "server", "name": public.name, "fingerprint": public.fingerprint}
        lines = [f"Keys of the {facts['role']} {public.name}, readable by their owner only", f"Fingerprint: {public.fingerprint}"]
    elif _begins_with(path, CHAIN_HEADER):
        chain = read_facts(path)
        facts, lines = _facts(chain), [*_described(chain), "Mode: readable by its owner only."]
    elif _begins_with(path, SHARED_KEY_HEADER):
        facts = {"fingerprint": shared_key_fingerprint(path)}
        lines = [
            "Shared key that is not bound to a roster and erases no round, readable by its owner only",
            f"Fingerprint: {facts['fingerprint']}",
        ]
    else:
        if _begins_with(path, b"-----BEGIN"):
            raise ValueError(
                f"expected a roster, a key file or a folder of keys, got {path.name}, one of the private keys in a folder; nothing was "
                f"shown; name the folder: privfed keys show {path.parent}"
            )
        roster = PinnedRoster.load(path)
        parties = [("server", roster.server), *(("client", member) for member in roster.members)]
        facts = {
            "fingerprint": roster.fingerprint,
            "parties": [{"role": role, "name": party.name, "fingerprint": party.fingerprint} for role, party in parties],
        }
        lines = [
            f"Roster of a server and {_clients(len(roster.members))}",
            *(f"  {role}  {party.name}  {party.fingerprint}" for role, party in parties),
            f"Fingerprint of the roster: {roster.fingerprint}",
            "Compare it over the phone: it is the same for all who pin the same names and keys.",
        ]
    if as_json:
        print_json(facts)
    else:
        _print(lines)


@app.command()
def scan(
    path: Annotated[Path, typer.Argument(metavar="PATH", show_default=False, help="A file or a folder.", readable=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Search files for secret keys, before they leave the house. Exit code 3: one was found; 0: none.

    Found are the secret keys of SEAL and TenSEAL contexts, plain, compressed or in base64, and those of privfed; in files of any kind
    and size, and inside zip, gzip, bzip2 and xz. Links are not followed. Whatever cannot be looked into (encrypted or damaged archives,
    zstd, 7z, rar) is named, and the exit code is 2 if nothing was found elsewhere.

    ```
    privfed keys scan dist/
    ```
    """
    from privfed.keys.scan import scan as search  # noqa: PLC0415 # --help must not wait for SEAL
    from privfed.keys.streams import Found  # noqa: PLC0415

    found: list[dict[str, str]] = []
    missed: list[dict[str, str]] = []
    for result in search(path):
        place = {"path": str(result.path), "inside": result.inside}
        where = "!".join(printable(part) for part in place.values() if part)
        if isinstance(result, Found):
            found.append(place | {"kind": result.kind.value})
            text = f"{where}: {result.kind.value}"
        else:
            missed.append(place | {"reason": result.reason})
            text = f"not searched: {where}: {result.reason}"
        if not as_json:
            typer.echo(text, err=not isinstance(result, Found))
    if as_json:
        print_json({"found": found, "not_searched": missed})
    if found:
        raise typer.Exit(FOUND)
    if missed:
        raise ValueError(f"nothing is known about what could not be looked into ({len(missed)} of it); no key was found elsewhere")
    if not as_json:
        typer.echo("No secret key was found.")


def _begins_with(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _clients(count: int) -> str:
    return f"{count} client{'' if count == 1 else 's'}"


def _facts(facts: "ChainFacts") -> dict[str, object]:
    return {
        "fingerprint": facts.fingerprint,
        "epoch": facts.epoch,
        "next_round": facts.next_round,
        "session": facts.session.hex(),
        "roster": facts.roster_digest.hex(),
    }


def _described(facts: "ChainFacts") -> list[str]:
    from privfed.keys.roster import grouped  # noqa: PLC0415

    erased = f"rounds 1 to {facts.next_round}" if facts.next_round > 1 else "round 1" if facts.next_round else "no round yet"
    return [
        f"Shared key of epoch {facts.epoch}, session {facts.session.hex()}",
        f"Fingerprint of the key: {facts.fingerprint}",
        f"Fingerprint of the roster: {grouped(facts.roster_digest)}",
        f"Erased: {erased}.",
    ]


def _print(lines: Iterable[str]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in lines:
        console.print(line)

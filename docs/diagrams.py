"""Draws the diagrams of the documentation: `python docs/diagrams.py` writes the files in `docs/diagrams`."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "diagrams"

INK, PAPER = "#1f2933", "#ffffff"
HIDDEN, OPENED, SECRET, PLAIN = "#2f6f9f", "#b4581a", "#8a6d00", "#9aa5b1"
"""Colours: what travels as ciphertext, what is open to who gets it, keys, and everything else."""

_FONT = "font-family='Helvetica, Arial, sans-serif'"
Part = list[str]


def box(x: int, y: int, width: int, height: int, title: str, *lines: str, key: str = "", colour: str = INK) -> Part:
    """A party: its name, what it has, and the key that it holds."""
    parts = [f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='#f5f7fa' stroke='{colour}' stroke-width='1.5'/>"]
    middle = x + width / 2
    parts += text(middle, y + 22, title, size=15, bold=True)
    for number, line in enumerate(lines):
        parts += text(middle, y + 42 + 17 * number, line, size=12.5)
    if key:
        parts.append(
            f"<rect x='{x + 10}' y='{y + height - 28}' width='{width - 20}' height='20' rx='10' fill='#fff3c4' stroke='{SECRET}'/>"
        )
        parts += text(middle, y + height - 14, key, size=12, colour=SECRET, bold=True)
    return parts


def text(x: float, y: float, words: str, *, size: float = 12.5, colour: str = INK, bold: bool = False, anchor: str = "middle") -> Part:
    """A line of text."""
    weight = " font-weight='bold'" if bold else ""
    return [f"<text x='{x:g}' y='{y:g}' {_FONT} font-size='{size:g}' fill='{colour}' text-anchor='{anchor}'{weight}>{escape(words)}</text>"]


def arrow(*points: tuple[int, int], colour: str, dashed: bool = False) -> Part:
    """A line through the points, with a head at its end."""
    path = " ".join(f"{x},{y}" for x, y in points)
    dash = " stroke-dasharray='6 4'" if dashed else ""
    head = f"marker-end='url(#head{colour[1:]})'"
    return [f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'{dash} {head}/>"]


def picture(width: int, height: int, title: str, *parts: Part) -> str:
    """An SVG document with a title for those who cannot see it."""
    heads = "".join(
        f"<marker id='head{colour[1:]}' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0,0 L10,5 L0,10 z' fill='{colour}'/></marker>"
        for colour in (HIDDEN, OPENED, SECRET, PLAIN, INK)
    )
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<defs>{heads}</defs>",
        f"<rect width='{width}' height='{height}' fill='{PAPER}'/>",
        *(line for part in parts for line in part),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def remark(x: int, y: int, title: str, *lines: str) -> Part:
    """What a reader must know of a picture, a title over lines."""
    parts = text(x, y, title, bold=True, colour=OPENED)
    for number, line in enumerate(lines):
        parts += text(x, y + 20 + 17 * number, line, colour=OPENED)
    return parts


def _banks(key: str, *lines: str) -> Part:
    parts: Part = []
    for number, name in enumerate(("bank_a", "bank_b", "bank_c")):
        parts += box(20, 20 + 110 * number, 190, 98, name, *lines, key=key)
    return parts


def _to(x: int, y: int, *, colour: str) -> Part:
    parts: Part = []
    for number in range(3):
        parts += arrow((210, 56 + 110 * number), (x, y - 16 + 16 * number), colour=colour)
    return parts


def _back(x: int, y: int, *, colour: str) -> Part:
    """From (x, y) downwards, under everything, and up the left side of the banks' column into each of them."""
    parts: Part = []
    for number in range(3):
        parts += arrow((x, y), (x, 368), (238, 368), (238, 96 + 110 * number), (212, 96 + 110 * number), colour=colour)
    return parts


def _shared_key() -> str:
    return picture(
        860,
        400,
        "SharedKey: every bank holds the key, the server adds ciphertexts and holds none",
        _banks("the shared key", "data, ledger, model"),
        _to(430, 170, colour=HIDDEN),
        text(350, 70, "updates, encrypted", colour=HIDDEN),
        box(430, 110, 200, 110, "server", "adds ciphertexts", "has no key", "sees who answers, and when"),
        _back(530, 220, colour=HIDDEN),
        text(395, 390, "the sum, encrypted: each bank opens it, once, when all have signed", colour=HIDDEN),
        remark(
            745,
            130,
            "Weakest point",
            "one bank together with",
            "the server opens every",
            "update; what that says of",
            "a record, epsilon bounds",
        ),
    )


def _threshold_key() -> str:
    return picture(
        860,
        400,
        "ThresholdKey: nobody holds a key, a quorum of banks opens each sum, and the server learns it",
        _banks("a fresh secret per round", "data, ledger, model"),
        _to(430, 170, colour=HIDDEN),
        text(350, 58, "updates, encrypted;", colour=HIDDEN),
        text(350, 75, "shares of secrets", colour=HIDDEN),
        box(430, 110, 200, 110, "server", "adds ciphertexts", "has no key", "learns the sum of each round", colour=OPENED),
        _back(530, 220, colour=OPENED),
        text(395, 390, "the sum, open to whoever sees the answers of a quorum", colour=OPENED),
        remark(
            745,
            130,
            "Weakest point",
            "the server, and whoever",
            "reads its traffic, knows the",
            "sum; no single update, with",
            "up to c corrupted banks",
        ),
    )


def _escrow_key() -> str:
    return picture(
        860,
        400,
        "EscrowKey: a key holder adds up the signed uploads itself and opens the sum for the banks",
        _banks("", "data, ledger, model", "has no key of the round"),
        _to(330, 170, colour=HIDDEN),
        text(292, 38, "updates,", colour=HIDDEN),
        text(292, 54, "encrypted", colour=HIDDEN),
        box(330, 110, 170, 110, "server", "passes on", "signed uploads", "has no key"),
        arrow((500, 150), (620, 150), colour=HIDDEN),
        text(560, 128, "all uploads,", colour=HIDDEN),
        text(560, 143, "signed", colour=HIDDEN),
        arrow((620, 196), (500, 196), colour=HIDDEN),
        text(560, 214, "the sum,", colour=HIDDEN),
        text(560, 230, "to banks only", colour=HIDDEN),
        box(620, 100, 215, 130, "key holder", "recomputes the sum", "opens it once, when all have", "signed", key="a key per attempt"),
        _back(415, 220, colour=HIDDEN),
        text(415, 390, "the sum, encrypted to the banks' own keys", colour=HIDDEN),
        remark(
            728,
            262,
            "Weakest point",
            "the key holder has every upload,",
            "and could open each, if it did not",
            "keep to the protocol",
        ),
    )


def _plaintext() -> str:
    return picture(
        860,
        400,
        "Plaintext: comparison runs in one process, which sees every update",
        f"<rect x='8' y='8' width='640' height='384' rx='10' fill='none' stroke='{PLAIN}' stroke-dasharray='6 4'/>".splitlines(),
        text(520, 40, "one process", colour=INK, bold=True),
        _banks("", "data, ledger, model"),
        _to(430, 170, colour=OPENED),
        text(350, 70, "updates in the clear", colour=OPENED),
        box(430, 110, 200, 110, "the sum", "sees every update", "nothing travels", colour=OPENED),
        _back(530, 220, colour=OPENED),
        text(395, 386, "the sum", colour=OPENED),
        remark(
            755,
            130,
            "For comparison only",
            "no wire format exists",
            "for it; the report says",
            "that it was used",
        ),
    )


def _threats() -> str:
    steps = (
        ("records", "a bank's table"),
        ("update", "DP-SGD, with noise"),
        ("upload", "CKKS, signed"),
        ("sum", "added on ciphertexts"),
        ("model", "after each round"),
    )
    walls = (
        ("ledger", "charges before", "training"),
        ("encryption", "nobody without", "the key reads it"),
        ("signatures", "bound to round", "and history"),
        ("approval", "all sign; policy;", "opened once"),
    )
    who = (
        (118, "the bank itself", "sees all of its own"),
        (290, "who holds a key", "and gets the upload"),
        (462, "server, outsider", "see ciphertext"),
        (634, "who opens: the banks", "(or quorum, holder)"),
        (806, "everybody with", "the model"),
    )
    parts: list[Part] = []
    for number, (title, line) in enumerate(steps):
        x = 48 + 172 * number
        parts.append(box(x, 70, 140, 62, title, line, colour=HIDDEN if title in ("upload", "sum") else INK))
        if number < len(walls):
            parts.append(arrow((x + 140, 100), (x + 172, 100), colour=HIDDEN if title in ("upload",) else INK))
            wall, *lines = walls[number]
            parts.append(text(x + 156, 22, wall, size=12.5, bold=True, colour=SECRET))
            parts += [text(x + 156, 38 + 14 * row, words, size=11, colour=SECRET) for row, words in enumerate(lines)]
    for x, party, sees in who:
        parts.append(
            arrow((x, 178), (x, 134), colour=OPENED if "key" in party or "open" in party or "model" in sees else PLAIN, dashed=True)
        )
        parts.append(text(x, 196, party, bold=True, size=12.5))
        parts.append(text(x, 212, sees, size=12))
    parts.append(
        text(
            462,
            244,
            "What a model, a sum or an update says about one record is bounded by epsilon, and by nothing else.",
            size=13,
            colour=OPENED,
        )
    )
    return picture(924, 260, "From records to model: what stands between, and who looks at each step", *parts)


def pictures() -> Mapping[str, str]:
    """Every diagram, by the name of its file."""
    return {
        "threats.svg": _threats(),
        "shared-key.svg": _shared_key(),
        "threshold-key.svg": _threshold_key(),
        "escrow-key.svg": _escrow_key(),
        "plaintext.svg": _plaintext(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, document in pictures().items():
        (FOLDER / name).write_text(document, encoding="utf-8")

"""Fuzzes one target with coverage guidance: `python -m tests.fuzz.one TARGET [libFuzzer options]`. Needs atheris."""

import sys

import atheris

# Its hook on comparisons keeps every array that is compared, which would look like memory that grows.
with atheris.instrument_imports(include=["privfed"], exclude=["privfed.he.codec"]):
    from tests.fuzz.targets import LARGEST, targets


def main() -> None:
    name = sys.argv[1]
    target = targets()[name]
    atheris.Setup([sys.argv[0], f"-max_len={LARGEST}", *sys.argv[2:]], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

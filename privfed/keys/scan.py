"""Looks for secret keys in files: before a package, an image or a folder leaves the house.

Every byte is looked at once, in blocks, so that a file may be larger than memory. Whatever is compressed inside (zip, gzip, bzip2, xz,
at any place of a file and inside each other) is expanded block by block and looked at as well; tar archives, pickles and arrays need no
expanding. What cannot be looked into is said: it must not pass for "nothing found".
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from privfed.keys.streams import BLOCK_BYTES, Allowance, Found, NotSearched, Stream

# What a file may expand to before it is taken for a bomb: this, and so many times its own size.
_EXPANDED_BYTES, _EXPANDED_TIMES = 1 << 30, 100


def scan(path: Path) -> Iterator[Found | NotSearched]:
    """Looks for secret keys in a file, or in every file below a folder. Links are not followed below the path itself.

    Args:
        path: A file or a folder.

    Raises:
        OSError: If there is none, or it cannot be read.
        ValueError: If it is neither.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        yield from _scan_file(path)
    elif stat.S_ISDIR(mode):
        yield from _scan_folder(path)
    else:
        raise ValueError(f"expected {path} to be a file or a folder, got something else; nothing was read")


def _scan_folder(root: Path) -> Iterator[Found | NotSearched]:
    left = [root]
    while left:
        path = left.pop()
        try:
            if path.is_dir():
                inner = [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)]
                left.extend(sorted((Path(entry.path) for entry in inner), reverse=True))
            else:
                yield from _scan_file(path)
        except OSError as error:
            yield NotSearched(path=path, inside="", reason=error.strerror or "it cannot be read")


def _scan_file(path: Path) -> Iterator[Found | NotSearched]:
    with path.open("rb") as file:
        stream = Stream(path=path, allowance=Allowance(_EXPANDED_BYTES + _EXPANDED_TIMES * os.fstat(file.fileno()).st_size))
        while block := file.read(BLOCK_BYTES):
            yield from stream.feed(block)
        yield from stream.finish()

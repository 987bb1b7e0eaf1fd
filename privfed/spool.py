"""A directory in which the server keeps signed messages, so that it can go on after a crash."""

from pathlib import Path

from privfed.files import create, make_folder


class Spool:
    """Files that are written once, whole or not at all, and readable by their owner only (files 0600, directory 0700).

    A message is on disk, synchronised, before `put` returns. A file is never replaced.

    Args:
        directory: Made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        make_folder(directory)
        self._directory = directory

    def path(self, name: str) -> Path:
        """Where the file of that name is or would be."""
        return self._directory / name

    def has(self, name: str) -> bool:
        """Whether the file was written."""
        return self.path(name).exists()

    def get(self, name: str) -> bytes:
        """Content of a file.

        Raises:
            FileNotFoundError: If it was never written.
        """
        return self.path(name).read_bytes()

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Writes a file. The same bytes again are fine.

        Raises:
            FileExistsError: If the file holds other bytes; it is left as it is.
        """
        try:
            create(self.path(name), data)
        except FileExistsError:
            if self.get(name) != data:
                raise

    def names(self, prefix: str) -> tuple[str, ...]:
        """Names of the files that start with the prefix, without it, sorted."""
        return tuple(sorted(path.name.removeprefix(prefix) for path in self._directory.iterdir() if path.name.startswith(prefix)))

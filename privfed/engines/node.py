from pathlib import Path


class Node:
    def __init__(self, folder: Path):
        self.folder = folder

    def answer(self, request: bytes) -> bytes:
        return request

    def close(self):
        pass

"""How alarming something is: told by a colour, and by a sign for those who cannot see it."""

from enum import Enum


class Tone(Enum):
    """How alarming something is. The value is the sign that stands beside the words."""

    CALM = "✓"
    CAUTION = "◐"
    DANGER = "⚠"

    @property
    def style(self) -> str:
        """Class of its colour."""
        return self.name.lower()

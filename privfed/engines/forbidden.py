"""What cannot be in the process of a server: torch, opacus, and the secret half of the encryption."""

import sys

_MODULES = (
    "torch",
    "opacus",
    "privfed.he.secret",
    "privfed.he.product_secret",
    "privfed.he.threshold_secret",
    "privfed.he.escrow_secret",
    "privfed.he._seal_secret",
)


def forbid_secrets() -> None:
    """Makes importing any of it fail from here on, in this process. To be called before anything else of privfed is imported.

    Raises:
        ImportError: If some of it is loaded already.
    """
    for module in _MODULES:
        if sys.modules.get(module) is not None:
            raise ImportError(f"{module} was loaded before the server began")
        sys.modules[module] = None  # pyright: ignore[reportArgumentType] # importing it raises ImportError from here on

"""A party's own code: `site.py` in its own folder, by that name and from nowhere else. It says what only this party knows.

    client()       the bank's `privfed.Client`: its records, how it trains, its ledger
    model()        the model, with the weights from which the session starts
    loss           loss per record; left out, binary cross-entropy
    correction()   correction of the gradients, or `Scaffold`; left out, none
    rule()         the rule of a session that looks at inner products, of which the agreement has the name alone; also at a key holder

Whoever may write the file may do everything that the bank's process may; so nobody but its owner may write it, and no message can name
another one.
"""

import runpy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from privfed.agreement import Agreement, NamedRule
from privfed.engines.party_folder import SITE
from privfed.errors import AgreementMismatchError
from privfed.files import read_pinned

_MOST_BYTES = 1 << 20


def run_site(folder: Path) -> Mapping[str, Any]:
    """Runs the file, and gives the names that it defines.

    Raises:
        OSError: If it cannot be read, or others than the owner may write it.
        ValueError: If it is no regular file.
    """
    read_pinned(folder / SITE, most=_MOST_BYTES)
    return runpy.run_path(str(folder / SITE), run_name="privfed_site")


def called(site: Mapping[str, Any], name: str) -> Any:
    """What a function of the file returns.

    Raises:
        ValueError: If the file has no such function.
    """
    function: Callable[[], Any] | None = site.get(name)
    if not callable(function):
        raise ValueError(f"expected {SITE} to define {name}(), got none; nothing was done")
    return function()


def with_rule(agreement: Agreement, site: Callable[[], Mapping[str, Any]]) -> Agreement:
    """The agreement with the rule itself where it has only the name of one.

    Args:
        agreement: As it was read.
        site: Gives the names of the party's own code; called only if they are needed.

    Raises:
        AgreementMismatchError: If that is another rule; nothing was done.
        ValueError: If the file does not define one.
    """
    if not isinstance(agreement.rule, NamedRule):
        return agreement
    complete = replace(agreement, rule=called(site(), "rule"))
    if complete.digest != agreement.digest:
        raise AgreementMismatchError(
            f"rule() in {SITE} is {complete.rule.name}, and the agreement has {agreement.rule.name}; nothing was done; agree on one"
        )
    return complete

"""A party's own code, in its own folder, by these names and from nowhere else.

`site.py`, of a bank, says what only this bank knows:

    client()       the bank's `privfed.Client`: its records, how it trains, its ledger
    model()        the model, with the weights from which the session starts
    loss           loss per record; left out, binary cross-entropy
    correction()   correction of the gradients, or `Scaffold`; left out, none

`rule.py`, of every bank and of the key holder, is agreed and the same everywhere. It is needed where the rule looks at inner products,
because the agreement has the name alone of such a rule:

    rule()         the rule; its module should load no torch, which a key holder does without

Whoever may write these files may do everything that the party's process may; so nobody but their owner may write them, and no message
can name other ones.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from privfed.agreement import Agreement, NamedRule
from privfed.engines.party_folder import RULE, SITE
from privfed.errors import AgreementMismatchError
from privfed.files import read_pinned

_MOST_BYTES = 1 << 20
_MODULE = "privfed_site"


def run_site(folder: Path) -> Mapping[str, Any]:
    """Runs a bank's own file, and gives the names that it defines.

    Raises:
        OSError: If it cannot be read, or others than the owner may write it.
        ValueError: If it is no regular file, or longer than 1 MB.
    """
    return _run(folder / SITE)


def check_site(folder: Path) -> None:
    """Refuses a bank's own file that `run_site` would not run, and does not run it.

    Raises:
        OSError: As `run_site`.
        ValueError: As `run_site`.
    """
    _checked(folder / SITE)


def _checked(path: Path) -> bytes:
    code = read_pinned(path, most=_MOST_BYTES + 1)
    if len(code) > _MOST_BYTES:
        raise ValueError(f"expected {path.name} to hold at most {_MOST_BYTES} bytes, got more; nothing was done")
    return code


def _run(path: Path) -> Mapping[str, Any]:
    """Runs the bytes that were checked: the file at the path could be another one by now."""
    program = compile(_checked(path), str(path), "exec")
    module = ModuleType(_MODULE)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module  # where the classes of the file look for their names
    exec(program, vars(module))  # noqa: S102 -- the party's own code, in its own folder
    return vars(module)


def called(site: Mapping[str, Any], name: str, *, file: str = SITE) -> Any:
    """What a function of a file returns.

    Args:
        site: The names that the file defines.
        name: Name of the function.
        file: Name of the file, for errors.

    Raises:
        ValueError: If the file has no such function.
    """
    function: Callable[[], Any] | None = site.get(name)
    if not callable(function):
        raise ValueError(f"expected {file} to define {name}(), got none; nothing was done")
    return function()


def with_rule(agreement: Agreement, folder: Path) -> Agreement:
    """The agreement with the rule itself where it has only the name of one.

    Args:
        agreement: As it was read.
        folder: The party's; its `rule.py` is run only if it is needed.

    Raises:
        AgreementMismatchError: If that is another rule; nothing was done.
        OSError: If the file cannot be read, or others than the owner may write it.
        ValueError: If the file does not define a rule.
    """
    if not isinstance(agreement.rule, NamedRule):
        return agreement
    rule = called(_run(folder / RULE), "rule", file=RULE)
    complete = replace(agreement, rule=rule)
    if complete.digest != agreement.digest:
        raise AgreementMismatchError(
            f"rule() in {RULE} is {complete.rule.name}, and the agreement has {agreement.rule.name}; nothing was done; agree on one"
        )
    return complete

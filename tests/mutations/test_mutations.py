from dataclasses import replace

import pytest

from tests.mutations.catalogue import CATALOGUE
from tests.mutations.run import ROOT, run


@pytest.mark.parametrize("mutation", CATALOGUE, ids=lambda mutation: mutation.name)
def test_every_fault_has_its_place_in_the_source(mutation) -> None:
    assert (ROOT / mutation.path).read_text(encoding="utf-8").count(mutation.before) == 1
    assert all((ROOT / path).is_file() for path in mutation.tests)


def test_a_fault_is_noticed_and_no_fault_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    fault = next(mutation for mutation in CATALOGUE if mutation.path == "privfed/he/codec.py")
    assert run([fault])
    assert not run([replace(fault, after=fault.before)])
    assert not run([replace(fault, before="this is nowhere")])
    assert [line.split()[0].strip(":") for line in capsys.readouterr().out.splitlines()] == ["noticed", "SURVIVED", "STALE"]


@pytest.mark.nightly
def test_every_fault_is_noticed() -> None:
    assert run(CATALOGUE)

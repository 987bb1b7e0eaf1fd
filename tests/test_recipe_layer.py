import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import privfed


@pytest.mark.parametrize("name", sorted(privfed._HOMES))
def test_every_name_of_the_recipe_layer_exists(name: str) -> None:
    assert getattr(privfed, name) is not None
    assert name in dir(privfed)


def test_type_checkers_see_the_names_that_are_there() -> None:
    tree = ast.parse(Path(privfed.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == privfed._HOMES


def test_dir_shows_the_recipe_layer_and_nothing_else() -> None:
    assert set(dir(privfed)) == {*privfed._HOMES, "__doc__", "__version__"}


def test_the_reference_documents_every_name_under_the_name_that_is_promised() -> None:
    page = (Path(privfed.__file__).parents[1] / "docs" / "reference.md").read_text()
    documented = re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(f"privfed.{name}" for name in privfed._HOMES)


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="'privfed' has no attribute 'encrypt'"):
        _ = privfed.encrypt


def test_importing_privfed_loads_no_torch_and_no_pandas() -> None:
    program = "import sys, privfed; raise SystemExit(bool({'torch', 'pandas', 'tenseal'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

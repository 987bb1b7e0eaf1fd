import subprocess
import sys

import pytest

FORBID = "from privfed.engines.forbidden import forbid_secrets\nforbid_secrets()"


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["torch", "opacus", "privfed.he.secret", "privfed.he.escrow_secret", "privfed.client"])
def test_a_server_cannot_import_what_decrypts_or_trains(module: str) -> None:
    result = run(FORBID, f"import {module}")
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr


def test_a_server_imports_its_own_part() -> None:
    result = run(
        "from privfed.engines.forbidden import forbid_secrets\nforbid_secrets()\nfrom privfed.engines.coordinator import coordinate"
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_process_that_has_loaded_a_secret_module_is_no_server() -> None:
    result = run("import privfed.he.secret", FORBID)
    assert "was loaded before the server began" in result.stderr

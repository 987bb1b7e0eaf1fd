import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from privfed.audit.findings import Audit
from privfed.cli import app
from privfed.data.paysim import NOBAL
from privfed.data.transactions import generate_transactions
from privfed.dp.clipping import AdaptiveClipping
from privfed.dp.ledger import Ledger
from privfed.dp.mechanism import PoissonSampledGaussian
from privfed.errors import LedgerError, UnsupportedDataError
from privfed.saved import SavedRun
from privfed.scenario import Scenario, run_scenario
from privfed.strict_json import checksum


def privfed(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "privfed", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )


def here(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result


def run(folder: Path, epsilon: float) -> Path:
    table = generate_transactions(rows=4000, fraud_rate=0.02, rng=np.random.default_rng(2))
    scenario = Scenario(banks=3, rounds=2, steps=5, feature_set=NOBAL, epsilon=epsilon)
    folder.mkdir()
    run_scenario(table, scenario, ledgers=folder).save(folder)
    return folder


@pytest.fixture(scope="module")
def private_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "private", 3.0)


@pytest.fixture(scope="module")
def open_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "open", math.inf)


def test_a_saved_run_is_read_as_it_was(private_run: Path) -> None:
    saved = SavedRun.load(private_run)
    assert saved.history.private
    assert saved.setup.columns == NOBAL.columns
    assert len(saved.history.rounds) == 2
    for statement in saved.statements():
        assert statement.epsilon == pytest.approx(saved.history.epsilon[statement.population])
        assert statement.epsilon == pytest.approx(statement.recompute())


def test_the_audit_of_a_private_run_finds_nothing_where_its_control_finds_records(private_run: Path) -> None:
    process = privfed("audit", str(private_run), "--quick", "--tier", "0", "--json")
    assert process.returncode == 0, process.stderr
    (private_run / "audit.json").unlink()  # the other tests want to make their own
    findings = json.loads(process.stdout)["findings"]
    assert {finding["control"] for finding in findings} == {True, False}
    assert all(not finding["certified"] for finding in findings if not finding["control"])
    assert any(finding["certified"] for finding in findings if finding["control"])


def test_the_audit_of_a_run_without_noise_lets_a_client_with_the_server_read_records(open_run: Path) -> None:
    audit = SavedRun.load(open_run).audit(repeats=3)
    finding = audit.shown("another client together with the server")
    outcome = json.loads(json.dumps(finding.to_json()))
    assert outcome["score"] > outcome["baseline"] + 0.2
    assert math.isinf(SavedRun.load(open_run).history.epsilon["bank_1"])


def test_an_audit_says_whether_the_banks_train_as_they_declare(private_run: Path, open_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    shown = " ".join(here("audit", str(folder), "--quick", "--tier", "0").stdout.split())
    verdict = "As declared: the noise and the clipping of bank_1, bank_2, bank_3"
    assert f"Training, measured with canaries. {verdict}" in shown
    assert json.loads((folder / "audit.json").read_text())["training_verdict"].startswith(verdict)
    here("report", str(folder))
    checks = {check["claim"]: check["holds"] for check in json.loads((folder / "report.json").read_text())["checks"]}
    assert checks["Every client's training adds the noise, and clips, as it declares."]
    assert SavedRun.load(open_run).audit(repeats=2).training_verdict == "Nothing to measure: no client says that it trains with noise."


def test_an_audit_charges_nothing(private_run: Path) -> None:
    def heads() -> list[bytes]:
        found = []
        for path in sorted(private_run.glob("*.ledger")):
            with Ledger.reopen(path) as ledger:
                found.append(ledger.head)
        return found

    before = heads()
    SavedRun.load(private_run).audit(repeats=2)
    assert heads() == before
    assert len(before) == 3


def test_the_report_uses_the_audit_that_was_kept_for_this_very_run_and_says_so(
    private_run: Path, open_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(private_run, folder)
    shutil.copytree(open_run, other)
    attacks: list[int] = []
    attack = SavedRun.audit

    def counted(self: SavedRun, *, repeats: int, progress: Callable[[int], None], **further: object) -> Audit:
        attacks.append(repeats)
        return attack(self, repeats=2, progress=progress)

    monkeypatch.setattr(SavedRun, "audit", counted)
    audited = here("audit", str(folder), "--quick", "--tier", "0", "--json")
    assert attacks == [3]
    reported = here("report", str(folder))
    assert attacks == [3]
    assert "Attacks: those of audit.json, over 2 batches of canaries" in reported.stdout
    assert json.loads((folder / "report.json").read_text())["audit"]["findings"] == json.loads(audited.stdout)["findings"]

    shutil.copy(folder / "audit.json", other / "audit.json")
    assert (
        "Attacks: run now, over 2 batches of canaries, because there was no audit.json of this very run"
        in here("report", str(other)).stdout
    )
    assert attacks == [3, 16]
    assert (other / "audit.json").read_bytes() != (folder / "audit.json").read_bytes()  # kept for the next time
    assert "those of audit.json" in here("report", str(other)).stdout
    assert attacks == [3, 16]

    before = (folder / "audit.json").read_bytes()
    assert "Attacks" not in here("report", str(folder), "--no-audit").stdout
    assert (folder / "audit.json").read_bytes() == before


def test_an_audit_ends_with_exit_code_3_and_says_which_limit_was_exceeded_by_what_after_it_was_kept(
    private_run: Path, tmp_path: Path
) -> None:
    folder, file = tmp_path / "run", tmp_path / "limits.toml"
    shutil.copytree(private_run, folder)
    audit = ("audit", str(folder), "--batches", "2", "--tier", "0")
    kept = here(*audit, "--max-epsilon", "3", "--require-as-declared")
    assert "All limits were kept." in kept.stdout
    (folder / "audit.json").unlink()
    result = CliRunner().invoke(app, [*audit, "--max-epsilon", "2", "--max-cells-read", "0", "--json"])
    assert result.exit_code == 3
    assert (folder / "audit.json").exists()
    found = json.loads(result.stdout)
    assert [line.partition(":")[0] for line in found["exceeded"]] == ["max_cells_read 0", "max_epsilon 2"]
    assert [line for line in result.stderr.splitlines() if line.startswith("limit not kept: max_epsilon 2: bank_1 spent 2.9")]
    file.write_text("max_epsilon = 2.5\n")
    assert CliRunner().invoke(app, [*audit, "--limits", str(file)]).exit_code == 3
    assert json.loads(here(*audit, "--json").stdout)["exceeded"] is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--max-cells-read", "1.5"), "expected max_cells_read from 0 and below 1, got 1.5"),
        (("--quick", "--batches", "4"), "expected --quick without --batches"),
        (("--batches", "1"), "expected --batches from 2, got 1"),
        (("--seconds", "0"), "expected --seconds to be a finite number above 0"),
        (("--limits", "absent.toml"), "absent.toml: No such file or directory"),
        (("--limits", "absent.toml", "--max-epsilon", "3"), "expected --limits without --max-epsilon"),
        (("--limits", "absent.toml", "--require-as-declared"), "expected --limits without --require-as-declared"),
    ],
)
def test_limits_that_cannot_be_meant_are_refused_before_anything_is_attacked(
    private_run: Path, options: tuple[str, ...], told: str
) -> None:
    result = CliRunner().invoke(app, ["audit", str(private_run), *options])
    assert result.exit_code == 2
    assert f"refused: {told}" in " ".join(result.stderr.split())
    assert not (private_run / "audit.json").exists()


@pytest.mark.parametrize("file", ["history.json", "model.npz", "initial.npz"])
def test_an_audit_is_bound_to_every_byte_that_the_run_wrote_and_to_the_version(
    private_run: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    saved = SavedRun.load(folder)
    saved.keep_audit(saved.audit(repeats=2))
    assert saved.kept_audit() is not None
    with monkeypatch.context() as patch:
        patch.setattr("privfed.saved.__version__", "0.0.1")
        assert saved.kept_audit() is None
    with (folder / file).open("ab") as stream:
        stream.write(b" ")
    assert saved.kept_audit() is None


def test_the_report_is_written_beside_the_run(private_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    process = privfed("report", str(folder), "--no-audit")
    assert process.returncode == 0, process.stderr
    page = (folder / "report.html").read_text()
    assert "bank_1" in page
    assert "not audited" in page
    assert json.loads((folder / "report.json").read_text())["audit"] is None


@pytest.mark.parametrize("command", ["audit", "report"])
def test_a_folder_without_a_run_is_refused_in_one_line_that_says_how_to_make_one(tmp_path: Path, command: str) -> None:
    told = {
        tmp_path: f"{tmp_path} holds no history.json",
        tmp_path / "absent": f"there is no folder {tmp_path / 'absent'}",
        Path(__file__): f"{__file__} is a file, not the folder of a run",
    }
    for wrong, words in told.items():
        process = privfed(command, str(wrong))
        assert process.returncode == 2
        assert process.stdout == ""
        (line,) = process.stderr.splitlines()
        assert line.startswith(f"refused: {words}")
        assert "nothing was done" in line
        assert "privfed simulate FILE.csv --out DIR" in line
        assert ("kept with privfed.save_run" in line) == (wrong == tmp_path)


def altered(run: Path, folder: Path, change: Callable[[Any], object], *, anew: bool = True) -> Path:
    """A copy of a run with an edited history, by somebody who does or does not compute the checksum anew."""
    shutil.copytree(run, folder)
    content = json.loads((folder / "history.json").read_text())
    seal = content.pop("checksum")
    change(content)
    (folder / "history.json").write_text(json.dumps(content | {"checksum": checksum(content) if anew else seal}))
    return folder


def training_of(bank: int, **values: object) -> Callable[[Any], object]:
    return lambda content: content["banks"][bank]["training"].update(values)


def account(content: Any) -> Any:
    return content["setup"]["clients"]["bank_1"]


def budgets(**values: object) -> Callable[[Any], object]:
    """Edits the budget of every bank, and where it stands for all of them."""

    def change(content: Any) -> None:
        for said in (content, *content["setup"]["clients"].values()):
            said["budget"].update(values)

    return change


def epsilon_of_round(content: Any) -> None:
    content["rounds"][0]["epsilon"]["bank_1"] *= 0.5


def no_noise(content: Any) -> None:
    training = {"learning_rate": 0.5, "batch_size": 512, "steps": 5, "seed": 0}
    content["banks"][1] |= {"mechanism": "NonPrivate", "training": training}
    content["private"] = False


def spent_less(content: Any) -> None:
    content["banks"][0]["epsilon"] *= 0.995
    content["rounds"][-1]["epsilon"]["bank_1"] *= 0.995


AGAINST_THE_LEDGER = {
    "noise": (training_of(0, noise_multiplier=5.0), "training"),
    "sample rate": (training_of(1, sample_rate=0.01), "training"),
    "steps": (training_of(2, steps=1), "training"),
    "another event": (training_of(0, batch_capacity=400), "training"),
    "no mechanism": (no_noise, "training"),
    "delta": (budgets(delta=1e-9), "delta"),
    "budget": (budgets(epsilon=2.9), "budget"),
    "no budget": (budgets(epsilon=None), "budget"),
    "earlier charges": (lambda content: account(content).update(earlier_charges=1), "number of charges"),
    "an epsilon on the way": (epsilon_of_round, "epsilon"),
    "an epsilon at the end": (spent_less, "epsilon"),
    "an absence": (lambda content: content["rounds"][0]["record"]["coefficients"].pop("bank_1"), "number of charges"),
}


@pytest.mark.parametrize("edit", AGAINST_THE_LEDGER)
def test_a_history_that_is_not_what_the_ledgers_charged_is_refused_though_its_checksum_was_computed_anew(
    private_run: Path, tmp_path: Path, edit: str
) -> None:
    change, named = AGAINST_THE_LEDGER[edit]
    saved = SavedRun.load(altered(private_run, tmp_path / "run", change))
    for use in (saved.statements, lambda: saved.audit(repeats=2)):
        with pytest.raises(LedgerError, match=f"its .*{named}.* is another than history.json says; nothing was done"):
            use()


WITHIN = {
    "mode": lambda content: content.update(mode="Plaintext"),
    "rule": lambda content: content.update(rule="Krum"),
    "private": lambda content: content.update(private=False),
    "parameters": lambda content: content.update(parameters=1),
    "pr_auc": lambda content: content.update(pr_auc=[1.0, 1.0]),
    "bytes_up_per_parameter": lambda content: content.update(bytes_up_per_parameter=0.1),
    "bytes_up of the banks": lambda content: content["banks"][0].update(bytes_up=1),
    "epsilon of the banks": lambda content: content["banks"][0].update(epsilon=0.1),
    "names of the banks": lambda content: content["rounds"][0]["record"]["selected"].append("bank_9"),
    "of the banks": lambda content: content["setup"]["clients"].update(bank_9=content["setup"]["clients"].pop("bank_1")),
    "names of the bank": lambda content: content["setup"]["clients"].pop("bank_1"),
    "features": lambda content: content["features"].append("name"),
    "keys": lambda content: content["keys"].update(mode="EscrowKey"),
    "budget": lambda content: content["budget"].update(epsilon=1.0),
    "numbers of the rounds": lambda content: content["rounds"][1]["record"].update(round=0),
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_history_that_says_two_things_is_refused_though_its_checksum_was_computed_anew(
    private_run: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UnsupportedDataError, match=f"{name}.* in it is not what follows from the rest; nothing was done"):
        SavedRun.load(altered(private_run, tmp_path / "run", WITHIN[name]))


@pytest.mark.parametrize("part", ["training", "record", "evaluation", "banks", "", "alpha", "setup"])
def test_any_other_edit_is_noticed_by_the_checksum(private_run: Path, tmp_path: Path, part: str) -> None:
    changes: dict[str, Callable[[Any], object]] = {
        "training": training_of(0, max_grad_norm=0.1),
        "record": lambda content: content["rounds"][0]["record"]["coefficients"].update(bank_1=7),
        "evaluation": lambda content: content["rounds"][0]["evaluation"].update(recall_at_1_percent_fpr=1.0),
        "banks": lambda content: content["banks"][0].update(records=5),
        "": lambda content: content.update(more=1),
        "alpha": lambda content: content.update(alpha=9.0),
        "setup": lambda content: content["setup"]["policy"].update(max_share=0.9),
    }
    with pytest.raises(UnsupportedDataError, match="the checksum in it is not what follows"):
        SavedRun.load(altered(private_run, tmp_path / "run", changes[part], anew=False))


UNREADABLE: dict[str, Callable[[Any], object]] = {
    "no rounds": lambda content: content.update(rounds=[]),
    "no banks": lambda content: content.update(banks=[]),
    "a sum of nothing": lambda content: content["rounds"][0]["record"].update(coefficients=dict.fromkeys(("bank_1", "bank_2"), 0)),
    "no coefficients": lambda content: content["rounds"][0]["record"].update(coefficients={}),
    "a negative coefficient": lambda content: content["rounds"][0]["record"]["coefficients"].update(bank_1=-5),
    "a text for a coefficient": lambda content: content["rounds"][0]["record"]["coefficients"].update(bank_1="5"),
    "a fraction of a client": lambda content: content["rounds"][0]["record"]["coefficients"].update(bank_1=0.5),
    "a text for names": lambda content: content["rounds"][0]["record"].update(selected="bank_1"),
    "numbers for names": lambda content: content["rounds"][0]["record"].update(refused=[1]),
    "a text for seconds": lambda content: content["rounds"][0]["record"]["seconds"].update(sum="long"),
    "a text for an epsilon": lambda content: content["rounds"][1]["epsilon"].update(bank_1="1"),
    "a negative epsilon": lambda content: content["rounds"][1]["epsilon"].update(bank_1=-1.0),
    "no epsilon": lambda content: content["rounds"][1]["epsilon"].pop("bank_1"),
    "a text for a metric": lambda content: content["rounds"][1]["evaluation"].update(pr_auc="1"),
    "a text for an error": lambda content: content["rounds"][1].update(grid_error_max="0"),
    "one field more": lambda content: content["rounds"][1].update(more=0),
    "a text for a delta": lambda content: account(content)["budget"].update(delta="1e-5"),
    "a text for a weight": lambda content: account(content).update(weight="1"),
    "fewer charges than none": lambda content: account(content).update(earlier_charges=-1),
    "no setup, as of an older version": lambda content: content.pop("setup"),
    "a rule that is none": lambda content: content["setup"]["rule"].update(kind="eval"),
    "a loss that is none": lambda content: content["setup"].update(loss={"kind": "print"}),
    "a model without layers": lambda content: content["setup"].update(widths=[8]),
    "a model of other inputs": lambda content: content["setup"]["widths"].__setitem__(0, 7),
    "parameters that encrypt nothing": lambda content: content["setup"]["params"].update(modulus=1),
    "no checksum": lambda content: None,
    "noise that is no number": training_of(0, noise_multiplier="1"),
}


@pytest.mark.parametrize("edit", UNREADABLE)
def test_a_history_that_cannot_be_read_is_refused_in_one_line(private_run: Path, tmp_path: Path, edit: str) -> None:
    folder = altered(private_run, tmp_path / "run", UNREADABLE[edit])
    if edit == "no checksum":
        content = json.loads((folder / "history.json").read_text())
        del content["checksum"]
        (folder / "history.json").write_text(json.dumps(content))
    for command in ("audit", "report"):
        result = CliRunner().invoke(app, [command, str(folder)])
        assert result.exit_code == 2
        assert "does not hold what this version of privfed writes; nothing was done" in " ".join(result.stderr.split())
    assert not (folder / "report.html").exists()


def test_a_key_that_stands_twice_in_a_history_is_refused(private_run: Path, tmp_path: Path) -> None:
    folder = altered(private_run, tmp_path / "run", lambda content: None)
    text = (folder / "history.json").read_text()
    (folder / "history.json").write_text(text.replace('"private": true', '"private": true, "private": true'))
    with pytest.raises(UnsupportedDataError, match="nothing was done"):
        SavedRun.load(folder)


@pytest.mark.parametrize("damage", ["{}", "[]", '{"features": []}', "not json"])
def test_a_damaged_history_is_refused(private_run: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    (folder / "history.json").write_text(damage)
    with pytest.raises(UnsupportedDataError, match="nothing was done"):
        SavedRun.load(folder)


@pytest.mark.parametrize("command", ["audit", "report"])
def test_a_ledger_of_another_bank_or_run_is_refused(private_run: Path, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    for suffix in (".ledger", ".ledger.head"):
        shutil.copy(private_run / f"bank_2{suffix}", folder / f"bank_1{suffix}")
    process = privfed(command, str(folder), "--quick")
    assert process.returncode == 2
    assert "is not the ledger that this run charged" in process.stderr
    assert not (folder / "report.html").exists()


def test_a_ledger_that_was_charged_since_is_refused(private_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    with Ledger.reopen(folder / "bank_1.ledger") as ledger:
        ledger.reserve(PoissonSampledGaussian(noise_multiplier=50.0, sample_rate=0.01, steps=1), session=b"later", round=0, attempt=0)
    with pytest.raises(LedgerError, match="nothing was done"):
        SavedRun.load(folder).statements()


@pytest.mark.parametrize(
    "variant",
    [
        {"batch_capacity": 300},
        {"records_per_customer": 2},
        {"adaptive_clipping": AdaptiveClipping(initial_norm=0.1, target_quantile=0.5, learning_rate=0.2, count_noise=20.0)},
    ],
    ids=lambda variant: next(iter(variant)),
)
def test_every_variant_of_training_is_read_as_it_was_written(private_run: Path, tmp_path: Path, variant: dict[str, object]) -> None:
    folder = tmp_path / "run"
    training = replace(SavedRun.load(private_run).history.training["bank_1"], **variant)
    altered(private_run, folder, training_of(0, **asdict(training)))
    assert SavedRun.load(folder).history.training["bank_1"] == training


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("model.npz", b"", "model.npz in {} is damaged or of another run; nothing was done; put the run's own file back, or make a folder"),
        (
            "model.npz",
            b"\x00random\xff" * 50,
            "model.npz in {} is damaged or of another run; nothing was done; put the run's own file back",
        ),
        ("model.npz", None, "model.npz is missing in {}; nothing was done; put the run's own file back, or make a folder with privfed"),
        ("initial.npz", b"", "initial.npz in {} is damaged or of another run; nothing was done; put the run's own file back"),
        (
            "initial.npz",
            None,
            "initial.npz is missing in {}; nothing was done; put the run's own file back, or make a folder with privfed simulate --out; "
            "what another version of privfed wrote, that version reads",
        ),
        ("history.json", bytes(range(256)), "history.json in {} does not hold what this version of privfed writes; nothing was done; put"),
        ("history.json", b"", "history.json in {} does not hold what this version of privfed writes; nothing was done; put the run's own"),
        ("bank_2.ledger", None, "bank_2.ledger is missing in {}; nothing was done; put the run's own file back, or make a folder"),
    ],
)
def test_a_file_of_a_run_that_is_damaged_or_missing_is_refused_in_one_line(
    private_run: Path, tmp_path: Path, file: str, content: bytes | None, told: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    for command in ("audit", "report"):
        result = CliRunner().invoke(app, [command, str(folder)])
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1].startswith(f"refused: {told.format(folder)}")
    assert not (folder / "report.html").exists()
    assert not (folder / "audit.json").exists()


def test_the_model_of_another_run_is_refused_though_it_can_be_read(private_run: Path, open_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    shutil.copy(open_run / "model.npz", folder / "model.npz")
    with pytest.raises(UnsupportedDataError, match=r"model\.npz in .* is damaged or of another run; nothing was done"):
        SavedRun.load(folder)
    shutil.copy(private_run / "model.npz", folder / "model.npz")
    assert SavedRun.load(folder).history.private


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(100), b"\x93NUMPY\x01\x00"])
def test_a_damaged_model_is_refused_even_if_its_digest_was_computed_anew(private_run: Path, tmp_path: Path, content: bytes) -> None:
    folder = altered(private_run, tmp_path / "run", lambda fields: fields.update(model_sha256=hashlib.sha256(content).hexdigest()))
    (folder / "model.npz").write_bytes(content)
    with pytest.raises(UnsupportedDataError, match="nothing was done"):
        SavedRun.load(folder)


def test_an_audit_tells_of_an_earlier_report_only_where_there_is_one(
    private_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private_run, folder)
    found = SavedRun.load(folder).audit(repeats=2)
    monkeypatch.setattr(SavedRun, "audit", lambda *_, **__: found)
    words = "The report that is there already tells of an earlier audit."
    assert words not in here("audit", str(folder)).stdout
    here("report", str(folder))
    assert words in " ".join(here("audit", str(folder)).stdout.split())

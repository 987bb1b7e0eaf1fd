"""The documentation is true as far as a machine can tell: examples run, and commands, options, files and names that it mentions exist."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

from privfed.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOP = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
PAGES = [*TOP, *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)]
BLOCK = re.compile(r"(?:<!-- (?P<not_run>not run[^\n]*) -->\n)?```(?P<language>python|bash|console)\n(?P<code>.*?)```", re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
PROMPT = re.compile(r"^(?:[a-z_, ]*\$ )")
OF_THE_README = ROOT / "README.md"  # its recipe needs banks: tests/test_examples.py runs it


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python(page: Path, *, run: bool) -> list[str]:
    blocks = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [block["code"] for block in blocks if block["language"] == "python" and (block["not_run"] is None) is run]


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Lines that somebody would type, prompts and comments taken off; and commands in running text. Whether each is the former."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        if block["language"] != "python":
            for line in block["code"].splitlines():
                for command in re.split(r" (?:&&|\||;) ", PROMPT.sub("", line).split("  #")[0].strip()):
                    yield command, True
    for inline in INLINE.finditer(BLOCK.sub("", text)):
        yield " ".join(inline[1].split()), False


def words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


RUNNABLE = [page for page in PAGES if page != OF_THE_README and python(page, run=True)]


def run(code: Sequence[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = folder / "page.py"
    program.write_text("\n".join(code), encoding="utf-8")
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_every_python_example_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    output = run(python(page, run=True), tmp_path)
    if page.stem == "tutorial":
        quality, guessing = (float(value) for value in re.search(r"PR-AUC ([\d.]+) guessing ([\d.]+)", output).groups())
        assert quality > 1.5 * guessing  # what the page trains does learn
        assert "nothing was trained" in output  # and the budget is kept
        assert "As declared" in output


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run(["one = 1", "one / 0"], tmp_path)


def test_the_pages_for_newcomers_have_examples_that_run() -> None:
    assert {"tutorial", "auditors", "concepts", "migration", "protocol", "keys"} <= {page.stem for page in RUNNABLE}


def test_names_of_others_in_examples_that_are_not_run_exist() -> None:
    found = 0
    for page in PAGES:
        for code in python(page, run=False):
            for statement in ast.walk(ast.parse(code)):
                if not isinstance(statement, ast.ImportFrom):
                    continue
                try:
                    module = importlib.import_module(statement.module)
                except ModuleNotFoundError as error:
                    if error.name == statement.module.split(".")[0]:
                        continue  # an extra that is not installed
                    raise
                for alias in statement.names:
                    assert hasattr(module, alias.name), f"{name_of(page)}: {statement.module} has no {alias.name}"
                    found += 1
    assert found  # Opacus and privfed are always there


def problems_of_command(arguments: Sequence[str], *, whole: bool) -> str:
    """What is wrong with a privfed command; empty if nothing is. One that stands in running text may leave its arguments out."""
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"no command {rest[0]}"
        command = command.commands[rest.pop(0)]
    options = {name: option for option in command.params if option.param_type_name == "option" for name in option.opts}
    positional: list[str] = []
    while rest:
        word, _, value = rest.pop(0).partition("=")
        if not word.startswith("-"):
            positional.append(word)
        elif word not in options and word != "--help":
            return f"no option {word}"
        elif word != "--help" and not value and not options[word].is_flag:
            if whole and not rest:
                return f"{word} has no value"
            del rest[:1]
    most = [argument for argument in command.params if argument.param_type_name == "argument"]
    variadic = any(argument.nargs == -1 for argument in most)
    if len(positional) > len(most) and not variadic:
        return f"{len(positional)} arguments, at most {len(most)} are taken"
    asks = {"--help", "--version", "--install-completion", "--show-completion"}
    missing = sum(1 for argument in most if argument.required) - len(positional)
    if whole and missing > 0 and not asks & set(arguments):
        return f"{missing} arguments are missing"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_privfed_command_that_a_page_names_exists_with_its_options(page: Path) -> None:
    wrong: list[str] = []
    for command, whole in commands(page):
        program, *arguments = words(command.split(" > ")[0]) or [""]
        if program == "privfed" and (problem := problems_of_command(arguments, whole=whole)):
            wrong.append(f"{command}: {problem}")
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("simulat log.csv", "no command simulat"),
        ("simulate log.csv --bank 5", "no option --bank"),
        ("simulate a.csv b.csv", "2 arguments, at most 1 are taken"),
        ("simulate", "1 arguments are missing"),
        ("audit run1 --max-epsilon", "--max-epsilon has no value"),
        ("simulate log.csv --banks 5 --quick", ""),
        ("--install-completion", ""),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command: str, problem: str) -> None:
    assert problems_of_command(command.split(), whole=True) == problem


def module_problem(module: str, arguments: Sequence[str]) -> str:
    """What is wrong with `python -m MODULE`; empty if nothing is. Options are looked for in the text of its main module."""
    path = ROOT / module.replace(".", "/")
    files = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else [path / "__main__.py"]
    if not files[0].is_file():
        return f"no module {module}"
    text = files[0].read_text(encoding="utf-8")
    for option in (word for word in arguments if word.startswith("--")):
        name = option.partition("=")[0]
        if name not in text and not re.search(rf"\b{name[2:].replace('-', '_')}: ", text):
            return f"{module} has no option {name}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_module_and_make_target_that_a_page_names_exists(page: Path) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    wrong: list[str] = []
    for command, _ in commands(page):
        match words(command):
            case ["python", "-m", module, *arguments] if module.split(".")[0] in {"benchmarks", "tests", "privfed"}:
                if problem := module_problem(module, arguments):
                    wrong.append(problem)
            case ["make", target] if target not in targets:
                wrong.append(f"no target {target}")
            case _:
                pass
    assert wrong == []


def test_commands_are_found_in_blocks_and_in_running_text() -> None:
    found = [
        (command, whole) for page in PAGES for command, whole in commands(page) if command.startswith(("privfed ", "python -m benchmarks."))
    ]
    assert ("privfed audit run1", True) in found
    assert ("privfed deploy init plan/fraud.toml --out deployment", True) in found  # behind a prompt
    assert ("privfed ledger verify", False) in found
    assert ("python -m benchmarks.he", False) in found


def test_a_benchmark_that_does_not_exist_is_noticed() -> None:
    assert module_problem("benchmarks.nothing", []) == "no module benchmarks.nothing"
    assert module_problem("benchmarks.he", ["--quicker"]) == "benchmarks.he has no option --quicker"
    assert module_problem("benchmarks.he", ["--quick", "--params", "1000"]) == ""


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [link.partition("#")[0] for link in LINK.findall(text) if not re.match(r"[a-z]+:|#", link)]
    return [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    assert broken_links(page) == []


def test_a_link_to_nowhere_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md), [there](nowhere.md) and [out](https://example.org)\n```\n[no](link.md)\n```\n")
    assert broken_links(page) == ["nowhere.md"]


def test_files_that_pages_name_exist() -> None:
    named = re.compile(r"`((?:examples|tests|docs|benchmarks|privfed)/[\w./-]+?\.(?:py|md|ipynb|toml|json))(?:::\w+)?`")
    missing = {
        f"{name_of(page)}: {path}"
        for page in PAGES
        for path in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    }
    assert missing == set()


def test_every_diagram_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    pictures = importlib.import_module("diagrams").pictures()
    assert {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "diagrams").glob("*.svg")} == dict(pictures)


def table(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_the_comparison_in_the_readme_has_the_numbers_of_its_page() -> None:
    page = (DOCS / "experiments" / "encryption.md").read_text(encoding="utf-8")
    measured = table(page[page.index("## A million parameters") : page.index("What is required")])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = table(readme[readme.index("## What encryption costs") :])
    names = {
        "privfed, `standard`": "standard",
        "privfed, `parity`": "parity",
        "NVIDIA FLARE HE, as provisioned": "flare",
        "TenSEAL, a vector per tensor": "tenseal-per-tensor",
        "Flower SecAgg+ (masks)": "flower-secagg+",
        "float32, unprotected": "float32",
    }
    for title, name in names.items():
        up, down, _, _, client, server, _, opener, _, _, memory, _, error = (cell.split(" (")[0] for cell in measured[name])
        assert shown[title][:6] == [up, down, client, server, opener, memory], title
        assert shown[title][6].endswith(error), title

"""Whether what would be published works: `make release-check`.

Builds the sdist, and the wheel from the sdist; installs the wheel into an empty environment, away from the checkout; runs the quick demo
there; writes a bill of materials of that environment; and looks for known vulnerabilities, where the service that knows them is reachable.
"""

import email
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
IN_THE_WHEEL = ("privfed/py.typed", "privfed/report/templates/")
IN_THE_SDIST = (
    "README.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "LICENSE",
    "constraints.txt",
    "constraints-lowest.txt",
    "Makefile",
    "tests/",
    "examples/",
    "benchmarks/",
    "docs/",
    "stubs/",
)
UNREACHABLE = (
    "ConnectionError",
    "Connection refused",
    "Max retries exceeded",
    "Name or service not known",
    "failed to connect",
    "ServiceError",
)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"release-check: failed: {' '.join(str(part) for part in command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def build() -> tuple[Path, Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)  # the sdist, and the wheel from the sdist
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    with tarfile.open(sdist) as archive:
        require({name.split("/", 1)[1] for name in archive.getnames() if "/" in name}, IN_THE_SDIST, sdist)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        require(names, IN_THE_WHEEL, wheel)
        if strays := sorted(name for name in names if not name.startswith(("privfed/", "privfed-"))):
            sys.exit(f"release-check: failed: the wheel would install {strays}")
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))))
    print(f"built {sdist.name} and {wheel.name}: {metadata['Name']} {metadata['Version']}, {metadata['Requires-Python']}")
    return sdist, wheel


def require(names: set[str], demanded: tuple[str, ...], archive: Path) -> None:
    if missing := [part for part in demanded if not any(name == part or name.startswith(part) for name in names)]:
        sys.exit(f"release-check: failed: {archive.name} lacks {missing}")


def install(wheel: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "venv", folder / "environment")
    python = folder / "environment" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, wheel, cwd=folder)
    home = run(python, "-c", "import privfed; print(privfed.__file__)", cwd=folder).strip()
    if not home.startswith(str(folder)):
        sys.exit("release-check: failed: the environment imports the checkout, not the wheel")
    return python


def demo(python: Path, folder: Path) -> None:
    run(python.with_name("privfed"), "demo", "--quick", "--out", folder / "demo", cwd=folder)
    report = json.loads((folder / "demo" / "report.json").read_text())
    if not (folder / "demo" / "report.html").stat().st_size or not report:
        sys.exit("release-check: failed: the demo wrote no report")
    print("the wheel runs privfed demo --quick in an empty environment outside the checkout")


def bill_of_materials(python: Path, wheel: Path) -> None:
    path = DIST / f"{wheel.name.split('-py3')[0]}.cdx.json"
    run(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--output-file", path, python)
    components = json.loads(path.read_text())["components"]
    names = {component["name"].lower() for component in components}
    if not {"privfed", "torch", "opacus", "tenseal"} <= names:
        sys.exit(f"release-check: failed: {path.name} lacks what the package stands on")
    print(f"wrote {path.name}: {len(components)} components")


def audit(python: Path) -> None:
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    command = [sys.executable, "-m", "pip_audit", "--path", site, "--progress-spinner", "off", "--timeout", "10", "--format", "json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode and any(sign in result.stderr for sign in UNREACHABLE):
        print("skipped: pip-audit, because the service that knows vulnerabilities is not reachable from here")
        return
    packages = [package for package in json.loads(result.stdout)["dependencies"] if package["name"] != "privfed"]
    known = [package for package in packages if "skip_reason" not in package]
    if vulnerable := {package["name"]: [entry["id"] for entry in package["vulns"]] for package in known if package["vulns"]}:
        sys.exit(f"release-check: failed: known vulnerabilities: {vulnerable}")
    if not known:
        print(f"skipped: pip-audit, because the service that is reachable from here knows none of the {len(packages)} packages")
        return
    unknown = sorted(package["name"] for package in packages if "skip_reason" in package)
    print(f"pip-audit knows of no vulnerability in {len(known)} packages" + (f"; it does not know {unknown}" if unknown else ""))


def main() -> None:
    _, wheel = build()
    with tempfile.TemporaryDirectory(prefix="privfed-release-") as name:
        folder = Path(name)
        python = install(wheel, folder)
        demo(python, folder)
        bill_of_materials(python, wheel)
        audit(python)


if __name__ == "__main__":
    main()

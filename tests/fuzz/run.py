"""Fuzzes every target for a while, and says how often it ran: `python -m tests.fuzz.run --minutes 10`. Needs atheris.

Each target is a process of its own with a limit on its memory and on the time of one input. A finding is a crash, an exception that
is not documented, a hang, memory that grows, or bytes that nobody signed and somebody accepted; the input is kept and named.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import corpus, targets

ROOT = Path(__file__).parents[2]
MEMORY_MB, INPUT_SECONDS = 1500, 10


@dataclass(frozen=True)
class Outcome:
    """What became of one target."""

    name: str
    per_minute: int
    peak_mb: int
    finding: Path | None


def fuzz(name: str, *, seconds: float, samples: tuple[bytes, ...], kept: Path) -> Outcome:
    """Fuzzes one target in a process of its own."""
    # A folder of its own: other targets are fuzzed at the same time, and their findings are not this one's.
    found = kept / name
    found.mkdir(parents=True, exist_ok=True)
    before = set(found.iterdir())
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-timeout={INPUT_SECONDS}",
        "-print_final_stats=1",
        f"-artifact_prefix={found}/",
    ]
    with tempfile.TemporaryDirectory(prefix=f"privfed-fuzz-{name}-") as seeds:
        for index, sample in enumerate((*samples, *corpus(name))):
            (Path(seeds) / f"seed-{index}").write_bytes(sample)
        command = [sys.executable, "-m", "tests.fuzz.one", name, *options, seeds]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    numbers = {key: int(value) for key, value in re.findall(r"stat::(\w+):\s+(\d+)", done.stderr)}
    new = sorted(set(found.iterdir()) - before)
    if done.returncode != 0 or "average_exec_per_sec" not in numbers:
        sys.stderr.write(done.stderr[-4000:])
        new = new or [found / "did-not-run"]
    per_minute = 60 * numbers.get("average_exec_per_sec", 0)
    return Outcome(name=name, per_minute=per_minute, peak_mb=numbers.get("peak_rss_mb", 0), finding=new[0] if new else None)


def main() -> int:
    """Fuzzes; 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together, on this many jobs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where inputs are kept that break a target")
    parser.add_argument("--json", action="store_true", help="one JSON object per target")
    arguments = parser.parse_args()
    found = {name: target.samples for name, target in targets().items()}
    seconds = 60 * arguments.minutes * arguments.jobs / len(found)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda name: fuzz(name, seconds=seconds, samples=found[name], kept=arguments.findings.resolve()), found))
    for outcome in outcomes:
        fields = {"target": outcome.name, "executions_per_minute": outcome.per_minute, "peak_mb": outcome.peak_mb}
        found_there = str(outcome.finding or "")
        if arguments.json:
            print(json.dumps(fields | {"finding": found_there}))
        else:
            rate = f"{outcome.per_minute:12,.0f} executions per minute {outcome.peak_mb:6} MB"
            print(f"{outcome.name:20} {rate}  {found_there or 'nothing found'}")
    return int(any(outcome.finding for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

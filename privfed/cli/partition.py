"""`privfed partition`."""

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console

from privfed.cli.arguments import AsJson, CsvFile, above_zero, alone, at_least, readable
from privfed.cli.terminal import print_json, table

_BANKS, _ALPHA, _SEED = 5, 0.5, 0
_MOST_BANKS = 1000


def partition(
    file: CsvFile,
    *,
    banks: Annotated[
        int | None, typer.Option(help="Number of simulated banks.", show_default=str(_BANKS), callback=at_least("--banks", 1))
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="How alike the banks are: 0.1 extreme skew, 0.5 a consortium, 1 moderate.",
            show_default=str(_ALPHA),
            callback=above_zero("--alpha"),
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="One bank per value of this column, in place of --banks, --alpha and --seed.", show_default=False
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Fixes who gets which record.", show_default=str(_SEED), callback=at_least("--seed", 0))
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Deal your own transactions to banks, and show how different the banks become.

    FILE.csv holds transactions in the columns of Kaggle's PaySim log, gzipped if you like; it is only read. The deal is the one that
    `privfed simulate` trains on, with the same banks, alpha and seed: a quarter is set aside for evaluation, and every bank has a
    fraud and a tenth of an even share. With `--column` all records are dealt, by that column alone.

    Per bank you see its records, frauds, and how far its share of frauds is from the whole, as Kullback-Leibler divergence (KL, in
    nats) and total variation distance (TVD, from 0 to 1). Simulation only: no real bank may publish these numbers.

    ```
    privfed partition log.csv --banks 5 --alpha 0.1
    privfed partition log.csv --column bankOrig
    ```
    """
    if column is not None:
        alone("--column", {"--banks": banks, "--alpha": alpha, "--seed": seed}, reason="the column alone says who gets what")
    readable(file)
    import numpy as np  # noqa: PLC0415 # --help must not wait for numpy and pandas

    from privfed.data.divergence import divergence_table  # noqa: PLC0415
    from privfed.data.partition import partition_by  # noqa: PLC0415
    from privfed.data.paysim import NOBAL, features, load_column, load_paysim  # noqa: PLC0415
    from privfed.deal import deal  # noqa: PLC0415

    how: dict[str, object]
    with Console(stderr=True, quiet=as_json).status("Reading the file"):
        samples = features(load_paysim(file), NOBAL)
        if column is None:
            how = {"alpha": alpha or _ALPHA, "seed": seed or _SEED}
            dealt = deal(samples, banks=banks or _BANKS, alpha=alpha or _ALPHA, seed=seed or _SEED)
            labels = {name: shard.labels for name, shard in dealt.banks.items()}
            extent, repairs, aside = dealt.partition, dealt.repairs, dealt.test.labels
        else:
            values = load_column(file, column)
            names = np.unique(values).tolist()
            if len(names) > _MOST_BANKS:
                raise ValueError(f"expected a column that names banks, got more than {_MOST_BANKS} values in {column}; nothing was split")
            how = {"column": column}
            extent, repairs, aside = partition_by(values), None, samples.labels[:0]
            labels = dict(zip(names, (samples.labels[part] for part in extent.indices), strict=True))
    divergences = divergence_table(list(labels.values()))
    rows = [
        {"bank": name, "records": len(own), "frauds": int(own.sum()), "kl_divergence": float(kl), "total_variation": float(tvd)}
        for (name, own), kl, tvd in zip(labels.items(), divergences["kl_divergence"], divergences["total_variation"], strict=True)
    ]
    if as_json:
        outside = {"set_aside": {"records": len(aside), "frauds": int(aside.sum())}}
        repaired = {"deviation": extent.deviation, "redraws": extent.redraws, "moved": extent.moved}
        print_json({"scope": "simulation only", **how, "banks": rows, **outside, **repaired, "notes": [repairs] if repairs else []})
        return
    caption = f"Simulation only. All together: {len(samples) - len(aside):,} records, {int(samples.labels.sum() - aside.sum()):,} frauds."
    if column is None:
        caption += (
            f" Set aside for evaluation, as privfed simulate does: {len(aside):,} records, {int(aside.sum()):,} frauds. Largest distance "
            f"of a count from its drawn share: {extent.deviation:.1f} records."
        )
    title = f"{file.name} by {column}" if column else f"{file.name} dealt to {len(rows)} banks, alpha {how['alpha']:g}"
    console = Console()
    console.print(table(title, ("bank", "records", "frauds", "fraud share", "KL", "TVD"), rows=_cells(rows), caption=caption))
    if repairs:
        console.print(f"[yellow]Note:[/yellow] {repairs}")


def _cells(rows: Iterable[dict[str, str | int | float]]) -> Iterable[tuple[str, ...]]:
    for row in rows:
        yield (
            str(row["bank"]),
            f"{row['records']:,}",
            f"{row['frauds']:,}",
            f"{float(row['frauds']) / float(row['records']):.3%}",
            f"{row['kl_divergence']:.5f}",
            f"{row['total_variation']:.5f}",
        )

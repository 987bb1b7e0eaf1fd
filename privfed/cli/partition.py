"""`privfed partition`."""

from typing import Annotated

import typer
from rich.console import Console

from privfed.cli.terminal import AsJson, CsvFile, print_json, table

_MOST_BANKS = 1000


def partition(
    file: CsvFile,
    *,
    banks: Annotated[int, typer.Option(help="Number of simulated banks.")] = 5,
    alpha: Annotated[float, typer.Option(help="How alike the banks are: 0.1 extreme skew, 0.5 a consortium, 1 moderate.")] = 0.5,
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One bank per value of this column, in place of --banks and --alpha.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes who gets which record.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Deal your own transactions to banks, and show how different the banks become.

    FILE.csv holds transactions in the columns of Kaggle's PaySim log, gzipped if you like; it is only read. Per bank
    you see its records, frauds, and how far its share of frauds is from the whole, as Kullback-Leibler divergence (KL, in nats)
    and total variation distance (TVD, from 0 to 1). Simulation only: no real bank may publish these numbers.

    ```
    privfed partition log.csv --banks 5 --alpha 0.1
    privfed partition log.csv --column bankOrig
    ```
    """
    import numpy as np  # noqa: PLC0415 # --help must not wait for numpy and pandas

    from privfed.data.divergence import divergence_table  # noqa: PLC0415
    from privfed.data.partition import dirichlet_partition, partition_by  # noqa: PLC0415
    from privfed.data.paysim import NOBAL, features, load_column, load_paysim  # noqa: PLC0415

    with Console(stderr=True, quiet=as_json).status("Reading the file"):
        samples = features(load_paysim(file), NOBAL)
        if column is None:
            dealt = dirichlet_partition(samples, clients=banks, alpha=alpha, rng=np.random.default_rng(seed))
            names = [f"bank_{position}" for position in range(1, banks + 1)]
            how: dict[str, object] = {"alpha": alpha, "seed": seed}
        else:
            values = load_column(file, column)
            names = np.unique(values).tolist()
            if len(names) > _MOST_BANKS:
                raise ValueError(f"expected a column that names banks, got more than {_MOST_BANKS} values in {column}; nothing was split")
            dealt = partition_by(values)
            how = {"column": column}
        labels = [samples.labels[part] for part in dealt.indices]
    divergences = divergence_table(labels)
    rows = [
        {"bank": name, "records": len(own), "frauds": int(own.sum()), "kl_divergence": float(kl), "total_variation": float(tvd)}
        for name, own, kl, tvd in zip(names, labels, divergences["kl_divergence"], divergences["total_variation"], strict=True)
    ]
    extent = {"deviation": dealt.deviation, "redraws": dealt.redraws, "moved": dealt.moved}
    if as_json:
        print_json({"scope": "simulation only", **how, "banks": rows, **extent})
        return
    caption = f"Simulation only. All together: {len(samples):,} records, {int(samples.labels.sum()):,} frauds."
    if column is None:
        caption += f" Largest distance of a count from its drawn share: {dealt.deviation:.1f} records."
    cells = (
        (
            str(row["bank"]),
            f"{row['records']:,}",
            f"{row['frauds']:,}",
            f"{row['frauds'] / row['records']:.3%}",
            f"{row['kl_divergence']:.5f}",
            f"{row['total_variation']:.5f}",
        )
        for row in rows
    )
    title = f"{file.name} by {column}" if column else f"{file.name} dealt to {banks} banks, alpha {alpha:g}"
    Console().print(table(title, ("bank", "records", "frauds", "fraud share", "KL", "TVD"), rows=cells, caption=caption))

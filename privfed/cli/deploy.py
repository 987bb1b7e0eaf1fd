"""`privfed deploy`: folders for every party of a consortium on several hosts, and what is wrong with one."""

from pathlib import Path
from typing import Annotated

import typer

from privfed.cli.arguments import AsJson
from privfed.cli.refusals import SUGGEST_COMMANDS
from privfed.cli.terminal import print_json

PROBLEMS = 1
"""Exit code of a check that found something wrong."""

app = typer.Typer(
    no_args_is_help=True, suggest_commands=SUGGEST_COMMANDS, help="A consortium on several hosts: a folder per party, and checks."
)

PartyFolder = Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="One party's folder.", readable=False)]


@app.command()
def init(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", show_default=False, help="Who takes part.", readable=False)],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", show_default=False, help="New folder, with a folder for every party in it.")],
) -> None:
    """Write a ready folder per party: keys, the agreement, certificates, hardened policies, commands to start.

    Give each party its own folder over a confidential channel, then delete it here. With `roster` in the plan, no party's signing key is
    made here.

    ```
    privfed deploy init fraud.toml --out deployment
    ```
    """
    from privfed.deploy.plan import Plan  # noqa: PLC0415 # --help must not wait for the cryptography
    from privfed.engines.deployments import write_deployment  # noqa: PLC0415

    deployment = write_deployment(Plan.load(plan), out)
    for name in ("server", *deployment.parties, "operator"):
        typer.echo(f"{out / name}")
    typer.echo("Give each party its own folder. In it: privfed deploy check FOLDER, then ./start.sh; the operator: ./submit.sh", err=True)


@app.command()
def certificates(
    folder: PartyFolder,
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", show_default=False, help="New folder for the engine's part of every party.")],
) -> None:
    """Make new certificates for every party, before the old ones expire. Keys, ledgers and models of the parties stay what they are.

    Every party replaces what it has in its own folder, with FLARE `flare/startup`, with Flower `flower/ca.pem` and the keys beside it, all
    at the same time: old and new ones do not trust each other. Only the folder that is named by `--out` is written to.

    ```
    privfed deploy certificates deployment/server --out renewed
    ```
    """
    from privfed.deploy.deployment import Deployment  # noqa: PLC0415 # --help must not wait for the cryptography
    from privfed.engines.deployments import RENEWED, write_certificates  # noqa: PLC0415

    deployment = Deployment.load(folder)
    write_certificates(deployment, out)
    typer.echo(
        f"Give each party its own folder in {out}. This takes the place of what the party has, at all of them at the same time: "
        f"{RENEWED[deployment.engine]}."
    )


@app.command()
def check(folder: PartyFolder, *, as_json: AsJson = False) -> None:
    """Tell what is wrong with one party's folder on this machine, a line each. Exit code 1: something is; 0: nothing was found.

    Looked at: certificates and their keys, the party's own keys, the clock, versions, the server's port, and the engine's policies.

    ```
    privfed deploy check deployment/bank_a
    ```
    """
    from privfed.deploy.deployment import party_name  # noqa: PLC0415 # --help must not wait for the cryptography
    from privfed.engines.deployments import problems as find  # noqa: PLC0415

    name, problems = party_name(folder), find(folder)
    if as_json:
        print_json({"party": name, "problems": problems})
    else:
        for problem in problems:
            typer.echo(problem)
    if problems:
        raise typer.Exit(PROBLEMS)
    if not as_json:
        typer.echo(f"Nothing is wrong with the folder of {name}, as far as it can be told from here.")

"""`python -m privfed` is the `privfed` command."""

from privfed.cli import app

app()

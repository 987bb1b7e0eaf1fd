"""Where a party's folder is, seen from FLARE."""

from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext


def party_folder(fl_ctx: FLContext) -> Path:
    """The folder of the party on whose machine this runs: the one that holds FLARE's workspace. No job can name another."""
    workspace: Any = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    return Path(workspace.get_root_dir()).resolve().parent

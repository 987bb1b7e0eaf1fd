"""What a bank's FLARE does for its server: what a job needs, and nothing else.

A site does not decide by itself who may give it a command: the server says in the command whether the site is to look at its own policy,
and what it leaves out is not looked at. So a server could have a bank print any file that FLARE's process may read. FLARE has no setting
against it; therefore all commands but those of a job are taken away, before the site connects.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from nvflare.apis.fl_component import FLComponent
from nvflare.private.defs import TrainingTopic
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

_TO_THE_SITE: Final = frozenset(
    {
        TrainingTopic.DEPLOY,
        TrainingTopic.CHECK_RESOURCE,
        TrainingTopic.CANCEL_RESOURCE,
        TrainingTopic.START_JOB,
        TrainingTopic.NOTIFY_JOB_STATUS,
        TrainingTopic.ABORT,
        TrainingTopic.DELETE_RUN,
    }
)
_TO_THE_JOB: Final = frozenset({"check_status", "abort", "abort_task", "shutdown"})


class JobCommandsOnly(FLComponent):
    """Takes away the commands that no job needs, in the process that makes it. It stands in a site's `local/resources.json`.

    Raises:
        RuntimeError: If this FLARE has not the commands that are expected; the process does not start.
    """

    def __init__(self) -> None:
        super().__init__()
        _keep(ClientRequestProcessors.request_processors, _TO_THE_SITE, lambda processor: processor.get_topics())
        _keep(AdminCommands.commands, _TO_THE_JOB, lambda command: [command.get_command_name()])


def _keep(known: list[Any], needed: frozenset[str], names: Callable[[Any], Sequence[str]]) -> None:
    kept = [each for each in known if needed.issuperset(names(each))]
    if {name for each in kept for name in names(each)} != needed:
        raise RuntimeError("this version of FLARE has other commands than privfed knows; nothing was started; install nvflare 2.9")
    known[:] = kept

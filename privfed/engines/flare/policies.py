"""Site policies of a FLARE deployment: nothing that comes with a job runs, nothing is stored where others can read it.

FLARE's own templates let the role "lead" send code to every site, keep the server's storage in a folder under /tmp, and send error
logs to the server.
"""

from typing import Any, Final

from privfed.engines.flare.job import COMMANDS, COORDINATOR, HEART_BEAT_TIMEOUT, PARTY

KIT: Final = "flare"
"""FLARE's workspace in a party's folder."""

# The working folder of a FLARE process is its workspace, and FLARE wants absolute paths: so the kit can be moved to its host as it is.
STORAGE: Final = "storage"
_STORAGE = f"/proc/self/cwd/{STORAGE}"

NO_CODE: Final = ("byoc", "server-predeployed-flwr")
"""The rights to run code that comes with a job, or beside it. No role has them."""

FORBIDDEN: Final = (*NO_CODE, "shell_commands", "operate", "download_job")
"""The rights that no role has."""

# What a server claims of a user is believed by a site, so what nobody may do is denied to every role. And a command that does not claim
# anything is not looked at: see `privfed.engines.flare.commands`.
_NOBODY = dict.fromkeys(FORBIDDEN, "none")
_LOOKING = dict.fromkeys(("submit_job", "clone_job", "manage_job"), "none") | {"view": "any"} | _NOBODY
_RUNNING = {"submit_job": "any", "clone_job": "none", "manage_job": "n:submitter", "view": "any"} | _NOBODY
AUTHORIZATION: Final[dict[str, Any]] = {
    "format_version": "1.0",
    "permissions": {"project_admin": _RUNNING, "lead": _RUNNING, "org_admin": _LOOKING, "member": _LOOKING},
}
"""Who may do what at a site, whatever the server says; the same at every site."""


def client_resources() -> dict[str, Any]:
    """What a bank's or the key holder's FLARE process is made of: no log leaves the site, and it takes no commands but those of a job."""
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [PARTY],
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "components": [
            {"id": "commands", "path": COMMANDS, "args": {}},
            {
                "id": "resource_manager",
                "path": "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
                "args": {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0},
            },
            {
                "id": "resource_consumer",
                "path": "nvflare.app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
                "args": {},
            },
            {
                "id": "process_launcher",
                "path": "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher",
                "args": {},
            },
        ],
    }


def server_resources() -> dict[str, Any]:
    """What the server's FLARE process is made of: its storage in its own folder, and no receiver of logs."""
    files = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [COORDINATOR],
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": 100,
                "heart_beat_timeout": HEART_BEAT_TIMEOUT,
                "download_job_url": "http://localhost/",
                "admin_timeout": 10.0,
            }
        ],
        "snapshot_persistor": {
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {
                "uri_root": "/",
                "storage": {"path": files, "args": {"root_dir": f"{_STORAGE}/snapshots", "uri_root": "/"}},
            },
        },
        "components": [
            {
                "id": "job_scheduler",
                "path": "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
                "args": {"max_jobs": 1},
            },
            {
                "id": "job_manager",
                "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                "args": {"uri_root": f"{_STORAGE}/jobs", "job_store_id": "job_store"},
            },
            {"id": "job_store", "path": files},
            {
                "id": "process_launcher",
                "path": "nvflare.app_common.job_launcher.server_process_launcher.ServerProcessJobLauncher",
                "args": {},
            },
        ],
    }

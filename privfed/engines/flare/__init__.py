"""The engine NVIDIA FLARE: it carries opaque bytes between the parties, over mutual TLS.

Needs the extra `privfed[flare]`. `exchange` and `controller` run at the server, without torch and without secret keys; `executor` at
each bank and at the key holder. `provisioning` writes start-up kits with hardened site policies; `job` the job, which is configuration
only; `submit` hands it to the server.
"""

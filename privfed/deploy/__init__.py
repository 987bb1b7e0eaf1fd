"""The folders of a deployment: what each party gets, and what is wrong with one.

This package knows no engine. An engine plugs in with two functions of its own, as `privfed.engines.flare.provisioning` has them:

* `write(deployment, folder)` adds what the engine needs to the folder of every party, and a folder for the engine's operator;
* `problems(folder, deployment)` lists what is wrong with the engine's part of one party's folder, a line each.
"""

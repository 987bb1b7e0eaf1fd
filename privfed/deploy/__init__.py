"""The folders of a deployment: what each party gets, and what is wrong with one.

Of an engine this package knows the name and the distribution; its part of the folders comes from `privfed.engines.deployments`.
"""

"""Engines whose variables describe a cluster: each file defines an `EnvironmentSource`; all files are read."""

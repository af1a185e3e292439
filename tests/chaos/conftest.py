"""The files of this folder find each other by name."""

"""Conformance suites: checks that every member of a family must pass, ours and a third party's."""

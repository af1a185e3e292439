"""Tables and the live display of runs."""

"""Collectives: ways to take means over workers. The contract is in paceline/processes/transport.py."""

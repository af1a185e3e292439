"""Transports: how calls of workers reach servers. The contract is in paceline/processes/transport.py."""

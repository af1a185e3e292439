"""Where system tests run: several network hosts, and a real Slurm, on one machine."""

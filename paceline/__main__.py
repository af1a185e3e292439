"""`python -m paceline`."""

from paceline.start import main

main()

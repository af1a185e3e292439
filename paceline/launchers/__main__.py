"""`python -m paceline.launchers`: a launcher in a process of its own (see `apart`)."""

from paceline.launchers.apart import main

raise SystemExit(main())

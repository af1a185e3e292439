"""`python -m paceline.launchers`: a launcher in a process of its own (see `apart`)."""

from paceline import interrupts

interrupts.leave_at_once()  # without a word: the process that started it says what happened

from paceline.launchers.apart import main  # noqa: E402

raise SystemExit(main())

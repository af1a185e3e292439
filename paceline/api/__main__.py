"""`python -m paceline.launchers`: a launcher in a process of its own (see `apart`)."""

from paceline import signals

signals.leave_at_once("")  # the process that started it says what happened

from paceline.api.detached import main  # noqa: E402

raise SystemExit(main())

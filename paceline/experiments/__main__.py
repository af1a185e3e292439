"""`python -m paceline.experiments`: a process that performs cells of a comparison (see `child`)."""

from paceline import signals

signals.leave_at_once()  # silently: the caller prints what happened

from paceline.experiments.child import main  # noqa: E402

raise SystemExit(main())

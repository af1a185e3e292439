"""`python -m paceline.api`: the supervisor of a run in a process of its own (see `detached`)."""

from paceline import signals

signals.leave_at_once()  # silently: the caller prints what happened

from paceline.api.detached import main  # noqa: E402

raise SystemExit(main())

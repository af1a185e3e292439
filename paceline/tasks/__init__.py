"""Tasks that come with paceline: every public function here that returns a `Task`, by its own name."""

"""The page of `paceline watch`: runs in a browser, on loopback, behind a token."""

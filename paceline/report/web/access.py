"""Who may see the page: only who has the token, under a name of loopback, from the page itself.

The token is in the address that is printed for the user. The first visit exchanges it for a cookie, and the token
leaves the address bar. A browser sends cookies to every port of a host, so that another server of this machine could
ask for them: the cookie is bound to a path that nobody can guess.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from email.message import Message
from urllib.parse import parse_qs, urlsplit

REFUSAL = "This page opens only with the address that `paceline watch` has printed."
COOKIE = "paceline-watch"
_LOOPBACK = re.compile(
    r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?"
)  # another name may be a stranger's (DNS rebinding)


class Access:
    """The token of one server, and the checks of every request."""

    def __init__(self, token: str | None = None) -> None:
        self._token = token or secrets.token_urlsafe(32)
        self._session = self._derived("session")
        self.root = f"/{self._derived('path')[:16]}/"

    def _derived(self, purpose: str) -> str:
        return hmac.new(self._token.encode(), purpose.encode(), hashlib.sha256).hexdigest()

    def address(self, port: int) -> str:
        """The address for the user. Anybody who knows it can open the page."""
        return f"http://127.0.0.1:{port}{self.root}?token={self._token}"

    def cookie(self) -> str:
        """The header Set-Cookie."""
        return f"{COOKIE}={self._session}; Path={self.root}; HttpOnly; SameSite=Lax"

    def has_token(self, target: str) -> bool:
        """Whether the address of a first visit has the token."""
        given = parse_qs(urlsplit(target).query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), self._token.encode())

    def admits(self, headers: Message) -> bool:
        """Whether a request has the cookie of a first visit, or the token as `Authorization: Bearer`."""
        given = headers.get("Authorization", "").removeprefix("Bearer ")
        cookies = (one.strip().partition("=") for one in headers.get("Cookie", "").split(";"))
        found = next((value for name, _, value in cookies if name == COOKIE), "")
        bearer = hmac.compare_digest(given.encode(), self._token.encode())
        return hmac.compare_digest(found.encode(), self._session.encode()) or bearer

    @staticmethod
    def local(headers: Message) -> bool:
        """Whether a request names this machine as loopback. Any port: it may come through a tunnel of ssh."""
        return _LOOPBACK.fullmatch(headers.get("Host", "")) is not None

    @staticmethod
    def own(headers: Message) -> bool:
        """Whether a request that changes something comes from the page itself, and not from one of another site."""
        same = headers.get("Origin") == f"http://{headers.get('Host')}"
        return same and headers.get("Sec-Fetch-Site", "same-origin") == "same-origin"

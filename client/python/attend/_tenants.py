# SPDX-License-Identifier: Apache-2.0
"""A warning for calls of a tenant that the server does not know."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

from attend_kernels import Error
from attend_kernels._printable import printable

_TIMEOUT = 10.0  # seconds, for asking the server
_AT_CLOSE = 1.0  # seconds that close() waits for that
_LATER = {4, 8, 14}  # codes after which a later call asks again


class Tenants:
    """The tenants that a client's server knows. A thread asks for them, so that no call waits for
    the answer, and warns of the unknown ones among those named until then. Calls never wait for a
    lock either, because a fork may copy a held one."""

    def __init__(self) -> None:
        self._known: frozenset[str] | None = None  # empty: the server does not tell
        self._named: set[str] = set()  # not yet checked
        self._asks = threading.Lock()  # held while a thread asks

    def check(self, name: str, ask: Callable[..., dict[str, Any]]) -> Callable[[], None] | None:
        """A function that warns if the tenant is known not to exist. If that is not known yet,
        `ask`, the client's server_info, is called on a thread, which then warns itself."""
        if self._known is None:
            self._named.add(name)
            if self._asks.acquire(blocking=False):
                try:
                    threading.Thread(target=self._learn, args=(ask,), daemon=True,
                                     name="attend-tenants").start()
                except RuntimeError:  # the interpreter is ending
                    self._asks.release()
        known = self._known  # perhaps learnt just now, by a thread that missed the name
        return functools.partial(self._warn, name, known) if known and name not in known else None

    def _learn(self, ask: Callable[..., dict[str, Any]]) -> None:
        try:
            self._known = known = frozenset(ask(timeout=_TIMEOUT).get("tenants", ()))
            while self._named:
                name = self._named.pop()
                if known and name not in known:
                    self._warn(name, known)
        except Error as failure:
            if failure.code not in _LATER:
                self._known = frozenset()
        finally:
            self._asks.release()

    def wait(self) -> None:
        """Waits for a question in flight, because a program of one call would end without its
        warning."""
        if self._asks.acquire(timeout=_AT_CLOSE):
            self._asks.release()

    @staticmethod
    def _warn(name: str, known: frozenset[str]) -> None:
        # All warnings come from this line, so that Python's filters show each text once.
        warnings.warn(f"the server has no tenant {printable(repr(name))}, only "
                      f"{printable(', '.join(sorted(known)))}: its calls count as 'default'")

# SPDX-License-Identifier: Apache-2.0
"""A warning for calls in the name of a tenant that the server does not know."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

from attend_kernels import Error
from attend_kernels._printable import printable

_TIMEOUT = 10.0  # seconds, of one question
_AT_CLOSE = 1.0  # of it, once the client is to be closed
_LATER = {4, 8, 14}  # a question that failed so, late or not taken, is asked again by a later call


class Tenants:
    """Those that a client's server knows. A thread asks for them, so that no call waits for the
    answer. It warns of the tenants that were named before they were known. A call waits for no
    lock either: a fork may find one taken."""

    def __init__(self) -> None:
        self._known: frozenset[str] | None = None  # empty: the server does not say
        self._named: set[str] = set()  # and not looked for yet
        self._asks = threading.Lock()  # is held while a thread does

    def check(self, name: str, ask: Callable[..., dict[str, Any]]) -> Callable[[], None] | None:
        """A function that warns that there is no such tenant, if that is known. Else `ask`, the
        client's server_info, is called and the warning comes when there is its answer."""
        if self._known is None:
            self._named.add(name)
            if self._asks.acquire(blocking=False):
                try:
                    threading.Thread(target=self._learn, args=(ask,), daemon=True,
                                     name="attend-tenants").start()
                except RuntimeError:  # the interpreter ends
                    self._asks.release()
            return None
        if not self._known or name in self._known:
            return None
        return functools.partial(self._warn, name, self._known)

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
        """For a question that is under way: a program of one call would end without its warning."""
        if self._asks.acquire(timeout=_AT_CLOSE):
            self._asks.release()

    @staticmethod
    def _warn(name: str, known: frozenset[str]) -> None:
        # Every warning is of this line, so that Python's filters show one for each text.
        warnings.warn(f"the server knows no tenant {printable(repr(name))}, only "
                      f"{printable(', '.join(sorted(known)))}: it counts as 'default'")

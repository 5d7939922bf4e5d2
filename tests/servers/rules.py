"""Which answers are spoiled, and how: rules that count what they have done."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

FAULTS = (
    "auth",
    "corrupt",
    "hang",
    "ignore_range",
    "long",
    "reset",
    "reset_body",
    "short",
    "slow",
    "stall",
    "status",
    "truncate",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way to spoil answers; what each does is told at :meth:`tests.servers.stores.FaultyStore.fail`."""

    match: str
    """Regular expression searched for in the decoded path of a request, without its query."""
    fault: str
    times: int = -1
    """How many requests to spoil; -1 for all."""
    skip: int = 0
    """How many requests to serve well before."""
    share: float = 1.0
    """Which part of the requests to spoil, drawn at random."""
    seed: int = 0
    """Of what is drawn."""
    each: bool = False
    """Whether every path has ``times`` and ``skip`` of its own."""
    method: str = "GET"
    """Regular expression for the method."""
    status: int = 503
    retry_after: float | None = None
    """Seconds told in a Retry-After header."""
    retry_date: bool = False
    """Whether that header holds a date rather than seconds."""
    at: int | None = None
    """Byte of the body where it happens, from the end if negative. None: the first for ``corrupt``, else the middle."""
    anywhere: bool = False
    """Whether it happens at a random byte instead."""
    rate: float = 0.0
    """Bytes a second for ``slow``."""
    seconds: float = 30.0
    """How long ``stall`` and ``hang`` last."""
    authorization: str = ""
    """What the header must be for ``auth`` to let a request pass."""

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(f"fault must be one of {', '.join(FAULTS)}, but got {self.fault!r}")

    def place(self, length: int, draw: random.Random) -> int:
        """The byte of a body of ``length`` bytes where it happens."""
        if length == 0:
            return 0
        if self.anywhere:
            return draw.randrange(length)
        if self.at is None:
            return 0 if self.fault == "corrupt" else length // 2
        return max(0, min(length - 1, self.at if self.at >= 0 else length + self.at))


class Rules:
    """The faults of a server, in the order in which they were added; the first that applies to a request spoils it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []

    def add(self, description: dict[str, Any]) -> None:
        """Add the fault of these fields."""
        with self._lock:
            self._rules.append(_Rule(Fault(**description)))

    def remove(self, beginning: str) -> None:
        """Remove the faults whose expressions begin so."""
        with self._lock:
            self._rules = [rule for rule in self._rules if not rule.fault.match.startswith(beginning)]

    def next_for(self, method: str, path: str, authorization: str) -> tuple[Fault, random.Random] | None:
        """What spoils this request, with the generator it draws from."""
        with self._lock:
            for rule in self._rules:
                if rule.applies(method, path, authorization):
                    return rule.fault, rule.draw
        return None


class _Rule:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.draw = random.Random(fault.seed)
        self._path = re.compile(fault.match)
        self._method = re.compile(fault.method)
        self._seen: Counter[str] = Counter()
        self._spoiled: Counter[str] = Counter()

    def applies(self, method: str, path: str, authorization: str) -> bool:
        """Whether the fault spoils this request; counts it if so."""
        fault = self.fault
        if not (self._method.fullmatch(method) and self._path.search(path)):
            return False
        if fault.fault == "auth" and authorization == fault.authorization:
            return False
        whose = path if fault.each else ""
        if 0 <= fault.times <= self._spoiled[whose]:
            return False
        self._seen[whose] += 1
        if self._seen[whose] <= fault.skip or self.draw.random() >= fault.share:
            return False
        self._spoiled[whose] += 1
        return True

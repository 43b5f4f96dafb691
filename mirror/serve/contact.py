"""The mirror's contact with its source, as its DCP port tells other mirrors (docs/protocol.md 4.7).

Knows the supervisor's last note. Invariant: a vbucket without a recent note has no contact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mirror.clock import Clock

NOTED_S = 5.0
"""A supervisor notes the contact every second; after this time the contact is unknown."""


class SourceContact:
    def __init__(self, vbids: Iterable[int], clock: Clock) -> None:
        self._vbids = tuple(vbids)
        self._clock = clock
        self._noted_s = clock.monotonic()
        self._lost_ms: Mapping[int, int] = dict.fromkeys(self._vbids, 0)

    def note(self, lost_ms: Mapping[int, int]) -> None:
        """Keep the vbuckets without contact, and for how many milliseconds they had none."""
        self._noted_s = self._clock.monotonic()
        self._lost_ms = lost_ms

    def lost_ms(self) -> dict[int, int]:
        """Return the milliseconds without contact of each vbucket that has none."""
        age_s = self._clock.monotonic() - self._noted_s
        lost = self._vbids if age_s > NOTED_S else self._lost_ms
        return {vbid: self._lost_ms.get(vbid, 0) + round(age_s * 1000) for vbid in lost}

"""What the user is told of a live run while it goes on, and what is put down of it.

What belongs here: which updates are refused, who is lost and there again, and who cannot reach
whom, as far as the command knows. What does not: what is done about it (`watch.py`,
`restarts.py`), and how a cut is found (`reach.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from archipel.actor import NodeId
from archipel.live.health import Health
from archipel.live.protocol import News, Status
from archipel.run.metrics import Recorder, link_name


@dataclass
class Notices:
    """What has been said so far.

    Attributes:
        recorder: where losses and cuts are put down.
        health: what hosts have said.
        refused: nodes of whose refused updates the user has been warned.
        cut: links that are cut, by the regions at their ends, and since when.
    """

    recorder: Recorder
    health: Health
    refused: set[NodeId] = field(default_factory=set)
    cut: dict[tuple[str, str], float] = field(default_factory=dict)

    def hear(self, node: NodeId, status: Status) -> None:
        """A host has answered."""
        for sender in status.refused.keys() - self.refused:
            warnings.warn(
                f"{node} refuses an update of {sender}: not finite, or absurdly large",
                stacklevel=3,
            )
        self.refused |= status.refused.keys()

    def tell(self, news: News, now_s: float) -> None:
        """All are told that a host is lost, or there again."""
        what = "lost" if news.life is None else "joined"
        self.recorder.happens(what, str(news.node), now_s)

    def look(self, now_s: float) -> bool:
        """See which links are cut, and which are not any more; whether any is."""
        pairs = self.health.cut_off(now_s)
        links: Mapping[tuple[str, str], tuple[NodeId, NodeId]] = {
            (min(a.region, b.region), max(a.region, b.region)): (a, b) for a, b in reversed(pairs)
        }
        for link, (a, b) in links.items():
            if link not in self.cut:
                self.cut[link] = now_s
                self.recorder.happens("cut", link_name(link), now_s)
                between = (
                    f"between {link[0]} and {link[1]}" if link[0] != link[1] else f"in {link[0]}"
                )
                warnings.warn(
                    f"{a} cannot reach {b} any more, and the command reaches both: the link "
                    f"{between} is cut, {now_s:.1f} s after the start. What was on its way there "
                    "is lost; who waits goes on when it is up again",
                    stacklevel=3,
                )
        for link in self.cut.keys() - links.keys():
            since_s = self.cut.pop(link)
            self.recorder.happens("mended", link_name(link), now_s)
            warnings.warn(
                f"{link[0]} and {link[1]} reach each other again, after {now_s - since_s:.1f} s",
                stacklevel=3,
            )
        return bool(links)

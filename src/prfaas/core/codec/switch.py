"""Coding of a link: used while the expected rate is higher than without.

Trials of coding by cache group, at growing intervals after failures.
"""

from __future__ import annotations

from collections import OrderedDict

from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.codec.gain import GAIN_MIN, CodecSpeed, EndLoad, link_rates

GROUPS_MAX = 1024
"""Groups remembered at once, of all layouts; the one that was used least recently is forgotten."""
SKIPPED_MAX = 1024
"""Fragments of a group that are sent untried between two trials, at most."""


class Trials:
    """Remembers of each group how many fragments to send raw before the next trial."""

    def __init__(self) -> None:
        self._skips: OrderedDict[tuple[bytes, int], tuple[int, int]] = OrderedDict()
        """By layout and group, how many to skip still, and how many after the next failure."""

    def should_try(self, layout_id: bytes, group: int) -> bool:
        """Return True if the next fragment of the group should be coded; counts the others."""
        left, after = self._skips.get((layout_id, group), (0, 1))
        if not left:
            return True
        self._skips[layout_id, group] = left - 1, after
        return False

    def tried(self, layout_id: bytes, group: int, *, has_shrunk: bool) -> None:
        """Take the result of a trial."""
        name = layout_id, group
        if has_shrunk:
            self._skips.pop(name, None)
            return
        _, after = self._skips.get(name, (0, 1))
        self._skips[name] = after, min(2 * after, SKIPPED_MAX)
        self._skips.move_to_end(name)
        if len(self._skips) > GROUPS_MAX:
            self._skips.popitem(last=False)


WEIGHT = 0.25
"""Time of the newest sample."""
NETWORK_SHARE_MIN = 0.5
"""Below it, the network is not what limits a link, and coding is off."""
SAMPLES_TO_CHANGE = 4
"""Samples in a row that have to ask for a change: one may be of a moment's hold-up."""


class CodingSwitch:
    """Decides from samples of a busy link; on until something is measured.

    A codec takes a tenth of the time that encryption and sockets take, so that starting with it
    costs little where it turns out not to pay.

    Args:
        speed: Of the codec at this host, taken for both ends.
    """

    def __init__(self, mode: LinkCodec, speed: CodecSpeed) -> None:
        self._mode = mode
        self._speed = speed
        self.is_on = mode is not LinkCodec.RAW
        self.gain = 1.0
        """Expected rate with coding for one without, of the last sample; 0 if the network is not
        the limit."""
        self._wire = 0.0
        self._sender = self._receiver = EndLoad()
        self._num_against = 0
        self._network_share = 1.0

    def sample(
        self,
        wire_bytes_per_s: float,
        ratio: float,
        sender_busy: float,
        receiver_busy: float,
        network_share: float = 1.0,
    ) -> None:
        """Take what was seen since the sample before, in which the link always had work.

        Args:
            wire_bytes_per_s: What it carried, as the network sees it.
            ratio: Bytes of blocks for a byte on the link, of fragments that were coded.
            sender_busy: Share of time, in [0, 1], in which the sending I/O thread ran or waited for
                a core, coding included.
            receiver_busy: The same of the receiving end; 0 if it is not known.
            network_share: Share of time, in [0, 1], in which connections waited for the network,
                and for neither end. An end can be the limit while its thread waits for others.
        """
        if self._mode is not LinkCodec.AUTO or not wire_bytes_per_s:
            return
        weight = WEIGHT if self._wire else 1.0
        self._wire += weight * (wire_bytes_per_s - self._wire)
        coded_bytes_per_s = wire_bytes_per_s * ratio if self.is_on else 0.0
        in_codec = coded_bytes_per_s / self._speed.encode, coded_bytes_per_s / self._speed.decode
        self._sender = _mixed(self._sender, EndLoad(sender_busy, in_codec[0]), weight)
        self._receiver = _mixed(self._receiver, EndLoad(receiver_busy, in_codec[1]), weight)
        rates = link_rates(self._wire, ratio, self._speed, self._sender, self._receiver)
        self._network_share += weight * (network_share - self._network_share)
        is_limit = self._network_share >= NETWORK_SHARE_MIN
        self.gain = rates.gain if is_limit else 0.0
        wants = self.gain >= (1.0 if self.is_on else GAIN_MIN)
        self._num_against = self._num_against + 1 if wants != self.is_on else 0
        if self._num_against >= SAMPLES_TO_CHANGE:
            self.is_on, self._num_against = wants, 0


def _mixed(old: EndLoad, new: EndLoad, weight: float) -> EndLoad:
    busy = old.busy + weight * (new.busy - old.busy)
    return EndLoad(busy, min(busy, old.coding + weight * (new.coding - old.coding)))

"""What a message weighs, and how its vectors travel, on any clock.

What belongs here: how large something is when it travels, and what arrives of it, the same for the
simulator, which models the bytes, and for the live engine, which moves them. What does not: how a
vector becomes codes (`codec.py`), how long a message takes (`sim/network.py`), and who carries it
(`live/`).

A weight is a share of the model: 1 is one vector of all the weights that a node holds, as fp32. So
one number is right for a small model that is timed as a large one, and for a run in which nothing
is trained and all vectors are empty.

How a vector travels follows from the run's `wire` and from what its message says it is:

- A **difference** goes by the run's codec. What int8 and int4 take from it by rounding, its sender
  adds to its next one (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., arXiv
  1901.09847). So what has arrived of all differences together is off by no more than one rounding.
- A **value** goes as bf16, also where the codec has fewer bits. Nothing is fed back: the next value
  replaces this one.
- All else, and the statistics behind the parameters of each vector, goes as fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from archipel.actor import Message, Sent, Vector
from archipel.run.codec import Codec, Coded, bytes_per_entry, coded_bytes, decoded, encode

BYTES_PER_ENTRY = 4
"""Of a vector on its way that no codec changes: fp32."""
FED_BACK: Sequence[Codec] = ("int8", "int4")
"""Codecs whose rounding is fed back. bf16 rounds an entry by 1/512 of itself at most: too little to
keep a vector for at each sender.
"""
IN_COLLECTIVES = "all_reduce"
"""The key of what is left of a node's part in collectives; see `Coder.left`."""

# Bytes


def vectors(message: Message) -> list[Tensor]:
    """All tensors among the fields of a message, in the order of its fields."""
    return [value for _, value in _parts(message) if isinstance(value, Tensor)]


def weight(message: Message, numel: int, wire: Codec = "fp32", parameters: int = 0) -> float:
    """What a message weighs, in models.

    A message's own `weight` counts first (see `actor.Message`), less what the codec saves. Else its
    tensors are measured, where there is a model to measure them by; and counted, one model each,
    where nothing is trained.

    Args:
        message: on its way, before it is coded.
        numel: entries of the whole vector of the node that sends it; 0 where nothing is trained.
        wire: the run's codec.
        parameters: how many leading entries of the node's vectors are parameters.
    """
    stated = message.weight
    if wire == "fp32":
        if stated is not None:
            return stated
        if numel:
            return _plain_bytes(message) / (BYTES_PER_ENTRY * numel)
        return float(len(vectors(message)))
    plain, small = _both_bytes(message, wire, parameters, trained=numel > 0)
    if stated is not None:
        return stated * small / plain if plain else stated
    return small / (BYTES_PER_ENTRY * numel if numel else BYTES_PER_ENTRY)


def share(vector: Vector, numel: int) -> float:
    """The part of a node's whole vector, of `numel` entries, that `vector` is; 1 where nothing
    is trained.
    """
    return len(vector) / numel if numel else 1.0


def saving(vector: Vector, codec: Codec, parameters: int) -> float:
    """What a vector takes by a codec, in parts of what it takes as fp32."""
    if not len(vector):
        return bytes_per_entry(codec) / BYTES_PER_ENTRY
    return _bytes(vector, codec, parameters) / vector.nbytes


def codec_of(kind: type[Message], name: str, wire: Codec) -> Codec:
    """By which codec a field of a kind of message travels."""
    if name in kind.differences:
        return wire
    return "bf16" if name in kind.values and wire != "fp32" else "fp32"


def _plain_bytes(message: Message) -> int:
    return sum(value.nbytes for _, value in _parts(message) if isinstance(value, (Tensor, Coded)))


def _both_bytes(
    message: Message, wire: Codec, parameters: int, *, trained: bool
) -> tuple[float, float]:
    """The bytes of a message's vectors as they are, and as they travel. Where nothing is trained, a
    vector counts as one entry.
    """
    plain = small = 0.0
    for name, value in _parts(message):
        if isinstance(value, Coded):
            plain, small = plain + value.nbytes, small + value.nbytes
        elif isinstance(value, Tensor):
            codec = codec_of(type(message), name, wire) if _is_vector(value) else "fp32"
            plain += value.nbytes if trained else BYTES_PER_ENTRY
            small += _bytes(value, codec, parameters) if trained else bytes_per_entry(codec)
    return plain, small


def _bytes(vector: Tensor, codec: Codec, parameters: int) -> int:
    if codec == "fp32":
        return vector.nbytes
    count = min(parameters, len(vector))
    return coded_bytes(count, codec) + BYTES_PER_ENTRY * (len(vector) - count)


def _is_vector(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.dtype == torch.float32


def _parts(message: Message) -> list[tuple[str, object]]:
    kind = type(message)
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(part.name for part in fields(message))
    return [(name, getattr(message, name)) for name in _FIELDS[kind]]


_FIELDS: dict[type[Message], tuple[str, ...]] = {}
"""Names of each kind of message's fields: to ask for them anew is slow."""

# What arrives


@dataclass(frozen=True, eq=False, slots=True)
class Parcel:
    """A message as it arrives, and the codes that travel of it, by field."""

    message: Message
    codes: Mapping[str, Coded]


@dataclass
class Coder:
    """How one node's vectors travel. What it keeps is part of the node's state.

    Attributes:
        wire: the run's codec.
        parameters: how many leading entries of the node's vectors are parameters. Of a shorter
            vector, a fragment, all entries are taken for parameters.
        left: what rounding has left over of the last difference, by kind of message and field, or
            of the last mean that this node had a part in.
        last: the last message that the actor has sent while it reacts, and what became of it: one
            that goes to several receivers is coded once, and all get the same.
    """

    wire: Codec = "fp32"
    parameters: int = 0
    left: dict[str, Vector] = field(default_factory=dict)
    last: tuple[Message, Parcel] | None = None

    def pack(self, message: Message) -> Parcel:
        """A message that the actor sends."""
        if self.wire == "fp32" or not self.parameters:
            return Parcel(message, {})
        if self.last and (message is self.last[0] or message is self.last[1].message):
            return self.last[1]
        codes: dict[str, Coded] = {}
        for name, value in _parts(message):
            codec = codec_of(type(message), name, self.wire)
            if codec != "fp32" and isinstance(value, Tensor) and _is_vector(value):
                key = f"{type(message).__name__}.{name}"
                fed_back = name in message.differences and codec in FED_BACK
                codes[name] = self._feed(key, value) if fed_back else self._encode(value, codec)
        opened: dict[str, Vector] = {name: coded.decode() for name, coded in codes.items()}
        parcel = Parcel(replace(message, **opened) if codes else message, codes)
        if codes:
            self.last = message, parcel
        return parcel

    def arrived(self, message: Sent) -> Sent:
        """`message` as it arrives."""
        parcel = self.pack(message)
        assert isinstance(parcel.message, type(message))
        return parcel.message

    def _encode(self, vector: Vector, codec: Codec) -> Coded:
        return encode(vector, codec, self.parameters)

    def _feed(self, key: str, vector: Vector) -> Coded:
        """Code a difference together with what is left of the one before, and keep what is left of
        both.
        """
        count = min(self.parameters, len(vector))
        before, meant = self.left.get(key), vector
        if before is not None and len(before) == count and _is_plausible(before, vector[:count]):
            meant = vector.clone()
            meant[:count] += before
        coded = self._encode(meant, self.wire)
        self.left[key] = _finite(meant[:count] - coded.decode()[:count])
        return coded

    # A mean, as a chain of sums

    def codes_sums(self, group: Sequence[object], *, difference: bool) -> bool:
        """Whether sums over `group` travel in fewer bits: those of differences do."""
        return difference and self.wire != "fp32" and self.parameters > 0 and len(group) > 1

    def left_of_sums(self, numel: int) -> Vector | None:
        """What is left of this node's part in the mean before, for vectors of `numel` entries."""
        left = self.left.get(IN_COLLECTIVES)
        return left if left is not None and len(left) == min(self.parameters, numel) else None

    def left_of_parts(self, numel: int, size: int, parts: Sequence[Vector | None]) -> Vector | None:
        """What is left of a mean that went part by part, each but the last of `size` entries; None:
        of no part anything new.

        Args:
            parts: what is left of each; None: as much as before, for this node has passed on what
                had come.
        """
        if all(part is None for part in parts):
            return None
        before = self.left_of_sums(numel)
        whole = torch.zeros(min(self.parameters, numel)) if before is None else before.clone()
        for number, part in enumerate(parts):
            if part is not None:
                whole[number * size : number * size + len(part)] = part
        return whole

    def keep(self, left: Vector | None) -> None:
        """A mean has come that this node had a part in; this is left of it."""
        if left is not None:
            self.left[IN_COLLECTIVES] = left

    def pass_on(
        self,
        total: Vector | Coded | None,
        mine: Vector | None,
        left: Vector | None,
        count: int,
        divisor: int = 1,
    ) -> tuple[Coded, Vector | None]:
        """One member's part in a sum that goes from member to member, or in a part of it: what it
        passes on, and what rounding leaves over there for the next sum (None: nothing is kept).

        All that the members pass on, hop by hop, is then the sum of what they have, but for what
        each of them keeps.

        Args:
            total: what has come from the member before; None: there was none.
            mine: what this member adds; None: its vector is refused.
            left: what it has kept from the mean before; for the leading entries that are coded.
            count: how many leading entries are coded.
            divisor: for the last member, who passes on a mean: of how many vectors it is.
        """
        terms = [decoded(one) for one in (total, mine) if one is not None]
        meant = terms[0] + terms[1] if len(terms) > 1 else terms[0].clone()
        if mine is not None and left is not None:
            meant[:count] += left
        coded = encode(meant / divisor if divisor > 1 else meant, self.wire, count)
        if self.wire not in FED_BACK:
            return coded, None
        over = _finite(meant[:count] - coded.decode()[:count] * divisor)
        return coded, over + left if mine is None and left is not None else over


def _finite(left: Vector) -> Vector:
    """What is left over, without what is not finite: that stands for nothing."""
    return left.nan_to_num_(0.0, 0.0, 0.0)


def _is_plausible(left: Vector, vector: Vector) -> bool:
    """Whether what is left of one difference can be added to the next. What is left is a small part
    of its difference: where it is larger than the next one, its difference was absurdly large. The
    receiver has refused that, and would have to refuse the next ones for what is left of it.
    """
    return not len(left) or not bool(left.abs().amax() > vector.abs().amax())

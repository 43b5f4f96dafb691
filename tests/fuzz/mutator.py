"""Bytes like those of a corpus, but broken: bits, numbers, lengths, pieces of other samples, cuts and repetitions."""

from __future__ import annotations

from random import Random

from tests.fuzz.targets import OPCODES

LENGTH_MAX = 4096
_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_WORDS = (b"[" * 1000, b'{"a":' * 200, b"\xff" * 6, b"\0", b":", b",", b"-1", b"1e999", b"nan", b'"', b"\xed\xa0\x80")


def mutate(rng: Random, samples: list[bytes]) -> bytes:
    """Change one of the samples a few times."""
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        _change(rng, data, samples)
    return bytes(data[:LENGTH_MAX])


def _change(rng: Random, data: bytearray, samples: list[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    what = rng.randrange(9)
    if what == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif what == 1 and data:
        data[at % len(data)] = rng.randrange(256)
    elif what == 2:
        size = rng.choice((1, 2, 4, 8))
        data[at : at + size] = (rng.choice(_NUMBERS) & (1 << 8 * size) - 1).to_bytes(size)
    elif what == 3:
        del data[at : at + rng.randrange(1, 20)]
    elif what == 4:
        data[at:at] = rng.randbytes(rng.randrange(1, 20))
    elif what == 5:
        other = rng.choice(samples)
        start = rng.randrange(len(other) + 1)
        data[at:at] = other[start : start + rng.randrange(1, 64)]
    elif what == 6:
        data[at:at] = rng.choice(_WORDS)
    elif what == 7 and len(data) > 1:
        data[1] = rng.choice(OPCODES)
    else:
        del data[at:]

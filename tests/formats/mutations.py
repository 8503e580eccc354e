"""Mutations that damage a file, each a function of its bytes and a random generator."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
from collections.abc import Callable
from typing import Any

__all__ = ["MUTATORS", "ODD", "dump", "edited", "join", "seal", "split"]

ODD: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        3,
        5,
        10_001,
        2**31,
        2**53 + 1,
        2**63,
        2**64,
        10**19,
        10**400,
    ),
    *(0.5, 1.0, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", "x", "x" * 3000, "\ud800", "\x00", "policy", "F32", "é", "0" * 64, "ertacache-profile"),
    *("1", "1010", "1111", "10101", "paper", "velocity"),
    *([], [0], [[]], [1, 2, 3], [0, 0], [True], [-1], [2**62, 2**62], [0.0], [None] * 50),
    *({}, {"a": 1}, {"a": [1]}, {"guidance_scale": [3]}, {"method": "paper"}, [{"mask": "1111"}]),
    [{"arguments": {}, "elements": 1, "fold": 1, "prompt": "a", "seed": 1}],
    *({"bands": bands, "channels": 3} for bands in (1, 2, 4, 5)),
    *({"bands": 2, "channels": 3, "counts": counts} for counts in ([1, 1], [0] * 8, [1] * 8)),
    [2, 0, 0, 0, 0, 0, 0, 0],
]
ODD_BYTES = [b"", b"\x00", b"\xff" * 8, b"{", b'{"a":', b"[" * 5000, b"NaN", b"\xed\xa0\x80"]
ODD_NUMBERS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e300, 5e-324, -1.0, 0.3]
ODD_LENGTHS = [
    0,
    1,
    2,
    7,
    2**20,
    2**22,
    2**22 + 1,
    2**31,
    2**32,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: str, buffer: bytes) -> bytes:
    text = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + buffer


def dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def seal(inner: str, buffer: bytes) -> str:
    digest = hashlib.sha256(inner.encode() + buffer).hexdigest()
    return f'{{"checksum":"{digest}",{inner[1:]}'


def edited(data: bytes, changes: dict[str, object]) -> bytes:
    """The file with other fields, ``"plans.0.history"`` for a nested one, and a right checksum."""
    header, buffer = split(data)
    fields = json.loads(header["__metadata__"]["ertacache"])
    del fields["checksum"]
    for path, value in changes.items():
        *outer, last = (int(part) if part.isdigit() else part for part in path.split("."))
        holder = fields
        for part in outer:
            holder = holder[part]
        holder[last] = value
    header["__metadata__"]["ertacache"] = seal(dump(fields), buffer)
    return join(dump(header), buffer)


# raw bytes


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite(data: bytes, rng: random.Random) -> bytes:
    place, piece = (
        rng.randrange(len(data)),
        rng.choice((rng.randbytes(rng.randrange(1, 40)), *ODD_BYTES)),
    )
    return data[:place] + piece + data[place + len(piece) :]


def insert_or_delete(data: bytes, rng: random.Random) -> bytes:
    place, width = rng.randrange(len(data)), rng.randrange(1, 40)
    if rng.random() < 0.5:
        return data[:place] + data[place + width :]
    return data[:place] + rng.randbytes(width) + data[place:]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice((0, 1, 7, 8, 9, len(data) - 1, rng.randrange(len(data))))]


def extend(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice((b"\x00", b" " * 8, rng.randbytes(8), data))


def change_length(data: bytes, rng: random.Random) -> bytes:
    near = struct.unpack("<Q", data[:8])[0] + rng.randrange(-9, 9)
    return struct.pack("<Q", rng.choice((near, *ODD_LENGTHS))) + data[8:]


def swap_sections(data: bytes, rng: random.Random) -> bytes:
    a, b, c = sorted(rng.choices(range(len(data) + 1), k=3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def garbage(data: bytes, rng: random.Random) -> bytes:
    body = rng.choice((rng.randbytes(rng.randrange(200)), *ODD_BYTES))
    return rng.choice((body, struct.pack("<Q", len(body)) + body + data[-64:]))


RAW = (
    flip_bits,
    overwrite,
    insert_or_delete,
    truncate,
    extend,
    change_length,
    swap_sections,
    garbage,
)


# JSON trees


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a JSON tree."""
    found: list[tuple[Any, Any]] = []
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found += [(tree, key), *places(value)]
    return found


def nest(rng: random.Random) -> Any:
    value: Any = []
    for _ in range(rng.choice((10, 200))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def edit_tree(tree: Any, rng: random.Random) -> None:
    """Replace, nudge, remove, add, rename or swap at a random place."""
    holder, key = rng.choice(places(tree))
    action = rng.randrange(7)
    if action <= 1:
        holder[key] = nest(rng) if rng.random() < 0.05 else copy.deepcopy(rng.choice(ODD))
    elif action == 2 and type(holder[key]) in (int, float):
        holder[key] += rng.choice((-1, 1, 0.5, 1e-9, 2**40))
    elif action == 3:
        del holder[key]
    elif action == 4 and isinstance(holder, dict):
        name = rng.choice(("extra", "", "a.b", "__metadata__", "plan.0.gain"))
        holder[name] = copy.deepcopy(rng.choice(ODD))
    elif action == 5 and isinstance(holder, dict):
        holder[key + "x"] = holder.pop(key)
    else:
        other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], holder[key]


def duplicate_key(text: str, rng: random.Random) -> str:
    quoted = [i for i in range(len(text)) if text.startswith(('{"', ',"'), i)]
    place = rng.choice(quoted) + 1
    name = text[place : text.index('"', place + 1) + 1]
    return f"{text[:place]}{name}:{rng.choice(('1', 'null', 'NaN', '{}'))},{text[place:]}"


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """Edit safetensors' own header, the checksum left as it is."""
    header, buffer = split(data)
    metadata = header["__metadata__"]
    if rng.random() < 0.3:
        inner = json.loads(metadata["ertacache"])
        edit_tree(inner, rng)
        metadata["ertacache"] = dump(inner)
    else:
        edit_tree(header, rng)
    text = dump(header)
    return join(duplicate_key(text, rng) if rng.random() < 0.15 else text, buffer)


def mutate_sealed(data: bytes, rng: random.Random) -> bytes:
    """Edit fields or numbers and make the checksum right again: only validation is left."""
    header, buffer = split(data)
    inner = json.loads(header["__metadata__"]["ertacache"])
    del inner["checksum"]
    if rng.random() < 0.3:
        place = 8 * rng.randrange(len(buffer) // 8)
        number = rng.choice((struct.unpack("<d", rng.randbytes(8))[0], *ODD_NUMBERS))
        buffer = buffer[:place] + struct.pack("<d", number) + buffer[place + 8 :]
    else:
        edit_tree(inner, rng)
    text = dump(inner)
    if len(text) > 2 and rng.random() < 0.1:
        text = duplicate_key(text, rng)
    header["__metadata__"]["ertacache"] = seal(text, buffer)
    return join(dump(header), buffer)


MUTATORS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "raw": lambda data, rng: rng.choice(RAW)(data, rng),
    "header": mutate_header,
    "sealed": mutate_sealed,
}

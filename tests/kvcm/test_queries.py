"""What a query finds, by examples; test_model.py has random ones."""

from __future__ import annotations

from typing import Any

import pytest

from hisparse.kvcm.token_hash import block_keys
from tests.kvcm.manager import Client, uris


def _query(client: Client, name: str, keys: list[int], kind: str, **more: Any) -> list[str]:
    """URIs of the answer's locations, "" for a miss."""
    found = client.meta(
        "getCacheLocation", instance_id=name, block_keys=keys, query_type=kind, **more
    )
    return uris(found)


@pytest.fixture
def stored(client: Client, name: str) -> dict[int, str]:
    """Keys 1, 2, 3, 5 and 6 serve, 4 is being written."""
    keys = [1, 2, 3, 5, 6]
    found = dict(zip(keys, client.put(keys, name), strict=True))
    client.write([4], name)
    return found


@pytest.mark.parametrize(
    ("keys", "mask", "hits"),
    [
        ([1, 2, 3, 4, 5], {}, [1, 2, 3]),
        ([3, 1], None, [3, 1]),
        ([7, 1], {}, []),
        ([1, 2, 3], {"offset": 1}, [2, 3]),
        ([1, 2, 3], {"offset": 0}, [1, 2, 3]),
        ([1, 2, 3], {"offset": 3}, []),
        ([1, 2, 3], {"offset": 9}, []),
        ([7, 4, 1, 2], {"offset": 2}, [1, 2]),
        ([1, 7, 2, 4, 3], {"bool_masks": {"values": [False, True, False, True]}}, [1, 2, 3]),
        ([1, 2, 7, 3], {"bool_masks": {"values": [True]}}, [2]),
        ([1, 2], {"bool_masks": {}}, [1, 2]),
    ],
)
def test_prefixes(
    client: Client, name: str, stored: dict[int, str], keys: list[int], mask: Any, hits: list[int]
) -> None:
    found = _query(client, name, keys, "QT_PREFIX_MATCH", block_mask=mask or {})
    assert found == [stored[key] for key in hits]


def test_batches(client: Client, name: str, stored: dict[int, str]) -> None:
    found = _query(client, name, [4, 6, 6, 9, 1], "QT_BATCH_GET", block_mask={"offset": 4})
    assert found == ["", stored[6], stored[6], "", stored[1]]


@pytest.mark.parametrize(
    ("keys", "size", "hits"),
    [
        ([1, 2, 3, 4, 5, 6], 2, [4, 5]),
        ([1, 2, 3, 4, 5, 6], 3, [0, 1, 2]),
        ([1, 2, 3, 4, 5, 6], 4, []),
        ([1, 2, 3, 4, 5, 6], 1, [5]),
        ([1, 2, 3, 5, 6], 2, [3, 4]),
        ([1], 1, [0]),
    ],
)
def test_windows(
    client: Client, name: str, stored: dict[int, str], keys: list[int], size: int, hits: list[int]
) -> None:
    found = _query(client, name, keys, "QT_REVERSE_ROLL_SW_MATCH", sw_size=size)
    assert found == [stored[key] if at in hits else "" for at, key in enumerate(keys)]


def test_keys_win_over_tokens_which_the_server_hashes(client: Client, name: str) -> None:
    """The instance's blocks have 4 tokens."""
    tokens = [5, -7, 1 << 40, 0, 9, 9, 9, 9, 1]
    keys = block_keys(tokens, 4)
    assert len(keys) == 2
    begun = client.meta(
        "startWriteCache", instance_id=name, block_keys=[], token_ids=tokens,
        write_timeout_seconds=30,
    )  # fmt: skip
    client.finish(begun, [True, True], name)
    assert client.match(keys, name) == uris(begun)
    more = {"token_ids": [1, 2, 3, 4]}
    assert _query(client, name, keys, "QT_BATCH_GET", **more) == uris(begun)
    longer = {"token_ids": [*tokens, 2, 3, 4], "query_type": "QT_PREFIX_MATCH"}
    assert uris(client.meta("getCacheLocation", instance_id=name, **longer)) == uris(begun)
    short = {"token_ids": [1, 2, 3], "query_type": "QT_PREFIX_MATCH"}
    assert client.meta("getCacheLocation", instance_id=name, **short)["locations"] == []


def test_requests_of_a_connector_for_vllm(client: Client, name: str) -> None:
    """Tokens without keys, a mask of what the engine has, and a session that has no blocks to end.

    Its last mask has a field that masks of flags do not have.
    """
    request = {"trace_id": "r", "instance_id": name, "token_ids": list(range(13))}
    write = request | {"block_keys": [], "write_timeout_seconds": 30}
    begun = client.meta("startWriteCache", **write)
    client.finish(begun, [True] * 3, name)
    masked = request | {"query_type": "QT_PREFIX_MATCH", "block_mask": {"offset": 1}}
    assert uris(client.meta("getCacheLocation", **masked)) == uris(begun)[1:]
    again = client.meta("startWriteCache", **write)
    assert again["locations"] == [] and again["block_mask"] == {"offset": 3}
    end = {
        "write_session_id": again["write_session_id"],
        "success_blocks": {"bool_masks": {"offset": 0}},
    }
    client.meta("finishWriteCache", trace_id="r", instance_id=name, **end)


def test_the_hash_of_tokens_is_that_of_int64_in_c() -> None:
    """Numbers of a C++ program."""
    keys = [
        -7046029254386353130, -8366447769517741626, 8024479182958521834, 455111481605203084,
    ]  # fmt: skip
    assert block_keys([1, 2, 3, 4], 1) == keys
    assert block_keys([1, 2, 3, 4, 5], 2) == keys[1::2]
    assert block_keys([5, -7, 1 << 40, 0], 4) == [450611456011089814]
    assert block_keys([1, 2], 3) == []

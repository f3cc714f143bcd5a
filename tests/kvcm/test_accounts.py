"""Accounts with roles, checked on each call of an administrator if that is switched on."""

from __future__ import annotations

import base64
import socket
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests

from tests.kvcm.manager import METHODS, Client, Manager, ManagerError, instance, wait_until

Start = Callable[..., Manager]


def _add(client: Client, name: str, role: str = "ROLE_USER", password: str = "secret") -> None:
    client.admin("addAccount", user_name=name, password=password, role=role)


def _basic(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def _status(manager: Manager, method: str, login: str | None) -> int:
    """HTTP's status; a service's error is none."""
    headers = {} if login is None else {"authorization": login}
    url = manager.http.url("admin", method)
    return requests.post(url, json={}, headers=headers, timeout=30).status_code


def _code(manager: Manager, method: str, login: str | None) -> str:
    """The same of gRPC."""
    types = METHODS["admin", method]
    with grpc.insecure_channel(f"127.0.0.1:{manager.ports['admin_rpc']}") as channel:
        call = channel.unary_unary(
            f"/{types.grpc_service}/{types.name}",
            types.request.SerializeToString,
            types.response.FromString,
        )
        metadata = () if login is None else (("authorization", login),)
        try:
            call(types.request(), metadata=metadata, timeout=30)
        except grpc.RpcError as error:
            code: str = error.code().name
            return code
        return "OK"


def test_accounts_are_added_listed_and_deleted(managers: Start, tmp_path: Path) -> None:
    manager = managers(store=str(tmp_path / "db"))
    _add(manager.http, "ann", "ROLE_ADMIN")
    _add(manager.grpc, "bob")
    with pytest.raises(ManagerError, match="account 'bob': got one that exists"):
        _add(manager.http, "bob")
    both = [
        {"user_name": "ann", "role": "ROLE_ADMIN"},
        {"user_name": "bob", "role": "ROLE_USER"},
    ]
    assert manager.http.admin("listAccount")["accounts"] == both
    manager.kill()
    manager.start()
    assert manager.grpc.admin("listAccount")["accounts"] == both
    manager.http.admin("deleteAccount", user_name="bob")
    with pytest.raises(ManagerError, match="account: got 'bob', expected one of those listed"):
        manager.http.admin("deleteAccount", user_name="bob")
    manager.stop()
    records = sqlite3.connect(tmp_path / "db").execute("SELECT value FROM records").fetchall()
    assert not any(b"secret" in x or b"bob" in x for (x,) in records)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"user_name": ""}, "user_name: got"),
        ({"user_name": "a:b"}, "user_name: got 'a:b', expected up to 128 letters"),
        ({"user_name": "x" * 129}, "user_name: got"),
        ({"password": ""}, "password: got 0 bytes, expected 1 to 1024"),
        ({"password": "x" * 1025}, "password: got 1025 bytes"),
        ({"role": 7}, "role: got 7, expected one of: ROLE_USER, ROLE_ADMIN"),
    ],
)
def test_accounts_that_are_none(client: Client, change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ManagerError, match=f"INVALID_ARGUMENT: {expected}"):
        client.admin("addAccount", **({"user_name": "u", "password": "p"} | change))


def test_each_call_of_an_administrator_needs_an_account(managers: Start, tmp_path: Path) -> None:
    place = str(tmp_path / "db")
    manager = managers(store=place)
    _add(manager.http, "ann", "ROLE_ADMIN", "pässword:1")
    _add(manager.http, "bob")
    manager.stop()
    manager = managers(store=place, login=True)
    ann, bob = _basic("ann", "pässword:1"), _basic("bob", "secret")
    for _, method in (x for x in METHODS if x[0] == "admin"):
        assert _status(manager, method, None) == 401, method
        assert _code(manager, method, None) == "UNAUTHENTICATED", method
    assert _code(manager, "listStorage", _basic("bob", "wrong")) == "UNAUTHENTICATED"
    for method in ("listStorage", "checkHealth", "getInstanceGroup", "listAccount"):
        assert _status(manager, method, bob) == 200
        assert _code(manager, method, bob) == "OK"
    for method in ("addStorage", "removeCache", "loadConfigSnapshot", "leaderDemote", "addAccount"):
        assert _status(manager, method, bob) == 403, method
        assert _code(manager, method, bob) == "PERMISSION_DENIED", method
    assert _status(manager, "genConfigSnapshot", ann) == 200
    assert _code(manager, "genConfigSnapshot", ann) == "OK"
    for wrong in ("", "Basic", "Basic !", "Basic YWJj", bob.replace("Basic", "Bearer"),
                  _basic("none", "secret"), _basic("ann", "secret"), _basic("", "")):  # fmt: skip
        assert _status(manager, "listStorage", wrong) == 401, wrong
    metrics = f"http://127.0.0.1:{manager.ports['admin_http']}/metrics"
    assert requests.get(metrics, timeout=30).status_code == 401
    shown = requests.get(metrics, headers={"authorization": bob}, timeout=30)
    assert "kvcm_manager_is_leader 1.0" in shown.text
    manager.http.meta("registerInstance", **instance())  # Engines need none.
    url = manager.http.url("admin", "deleteAccount")
    gone = requests.post(
        url, json={"user_name": "bob"}, headers={"authorization": ann}, timeout=30
    ).json()
    assert gone["header"]["status"]["code"] == "OK"
    assert _status(manager, "listStorage", bob) == 401


def test_who_does_not_lead_has_no_accounts(managers: Start, tmp_path: Path) -> None:
    place = str(tmp_path / "db")
    managers(store=place)
    waits = managers(store=place, login=True)
    assert not waits.http.admin("checkHealth")["is_leader"]
    for method in ("updateLogger", "listAccount", "addStorage"):
        with pytest.raises(ManagerError, match="SERVER_NOT_LEADER: .*expected the leader: 127"):
            waits.http.admin(method)
        with pytest.raises(ManagerError, match="SERVER_NOT_LEADER"):
            waits.grpc.admin(method)


def test_who_asks_before_it_leads_is_not_answered_after(managers: Start, tmp_path: Path) -> None:
    """The accounts came while the body of the request did."""
    place = str(tmp_path / "db")
    first = managers(store=place)
    _add(first.http, "ann", "ROLE_ADMIN")
    waits = managers(store=place, login=True)
    with socket.create_connection(("127.0.0.1", waits.ports["admin_http"])) as slow:
        path = METHODS["admin", "listAccount"].http_path
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{".encode())
        time.sleep(0.2)
        first.stop()
        wait_until(lambda: _status(waits, "listAccount", None) == 401)
        slow.sendall(b"}")
        answer = slow.recv(1 << 16).decode()
        while "NOT_LEADER" not in answer and "ann" not in answer:
            more = slow.recv(1 << 16).decode()
            assert more, answer
            answer += more
    assert "SERVER_NOT_LEADER" in answer and "ann" not in answer.partition("\r\n\r\n")[2]


def test_guesses_do_not_queue(managers: Start, tmp_path: Path) -> None:
    place = str(tmp_path / "db")
    manager = managers(store=place)
    _add(manager.http, "ann", "ROLE_ADMIN")
    manager.stop()
    manager = managers(store=place, login=True)
    ann = _basic("ann", "secret")
    assert _status(manager, "listStorage", ann) == 200
    wrong = [_basic("ann", str(guess)) for guess in range(16)]
    with ThreadPoolExecutor(16) as pool:
        guesses = [pool.submit(_status, manager, "listStorage", each) for each in wrong]
        # Who has logged in is known.
        assert _status(manager, "listStorage", ann) == 200
        assert {x.result() for x in guesses} == {401, 429}

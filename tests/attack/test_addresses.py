"""Nothing that a request names leads into the operator's network or a cloud's inside."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from quire.core.errors import RequestError
from quire.media.addresses import is_public
from quire.media.fetch import FetchPolicy, fetch

# First, last and one inner address of what is not public; IANA's blocks and the clouds' own.
INSIDE = (
    *("0.0.0.0", "0.255.255.255", "10.0.0.1", "100.64.0.1", "100.100.100.200"),
    *("100.127.255.255", "127.0.0.1", "127.255.255.255", "168.63.129.16", "169.254.0.0"),
    *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.0", "192.0.0.8", "192.0.0.9"),
    *("192.0.0.170", "192.0.0.192", "192.0.0.255", "192.0.2.1", "192.31.196.1", "192.52.193.1"),
    *("192.88.99.1", "192.88.99.2", "192.168.0.1", "192.175.48.1", "198.18.0.1"),
    *("198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "233.252.0.1"),
    *("239.255.255.255", "240.0.0.1", "255.255.255.255", "::", "::1", "::7f00:1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:168.63.129.16", "::ffff:0:127.0.0.1"),
    *("64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "64:ff9b:1:fffe::8.8.8.8"),
    *("100::1", "100:0:0:1::1", "200::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
    *("2001:1::1", "2001:2::1", "2001:3::1", "2001:4:112::1", "2001:10::1", "2001:20::1"),
    *("2001:30::1", "2001:1ff:ffff::1", "2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::1"),
    *("2620:4f:8000::1", "3fff::1", "3fff:fff:ffff::1", "4000::1", "5f00::1", "fc00::1"),
    *("fd00:ec2::254", "fdff::1", "fe80::1", "febf::1", "fec0::1", "fec0:0:0:ffff::1"),
    *("feff::1", "ff02::1", "ff0e::1"),
)
OUTSIDE = (
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0"),
    *("126.255.255.255", "128.0.0.0", "168.63.129.15", "168.63.129.17", "169.253.255.255"),
    *("172.15.255.255", "172.32.0.0", "192.0.1.0", "192.88.98.255", "192.88.100.0"),
    *("198.17.255.255", "198.20.0.0", "223.255.255.255", "2001:200::1", "2001:4860:4860::8888"),
    *("2002:808:808::1", "2606:4700:4700::1111", "2a00:1450::1", "3ffe::1", "3fff:1000::1"),
    *("64:ff9b::8.8.8.8", "::ffff:8.8.8.8"),
)


@pytest.mark.parametrize("address", INSIDE)
def test_inside(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", OUTSIDE)
def test_outside(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", INSIDE)
async def test_none_is_connected_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was begun")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(RequestError) as refused:
        await fetch(f"http://{host}/x", FetchPolicy(allow_hosts=True), param="url")
    assert refused.value.code == "media_not_allowed"

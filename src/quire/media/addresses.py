"""Checks whether addresses are on the public internet.

The table is Quire's own, since the table of Python's `ipaddress` depends on Python's version.
Sources: IANA's IPv4 and IPv6 Special-Purpose Address Registries, as of 2025-10-09, without the
blocks that they call globally reachable; RFC 3879, 4291 and 5771 for ranges that the registries
leave out; and addresses inside public blocks at which cloud providers serve their own machines.
"""

from __future__ import annotations

import ipaddress

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_NOT_PUBLIC_4 = tuple(
    ipaddress.IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private use
        "100.64.0.0/10",  # shared address space
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure: name service, metadata, agent
        "169.254.0.0/16",  # link local, and the metadata of most clouds
        "172.16.0.0/12",  # private use
        "192.0.0.0/24",  # IETF protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112: answered nearby, by whoever runs it
        "192.52.193.0/24",  # automatic multicast tunnelling
        "192.88.99.0/24",  # 6to4 relays, withdrawn
        "192.168.0.0/16",  # private use
        "192.175.48.0/24",  # AS112, delegated directly
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and limited broadcast
    )
)

# All global unicast addresses; loopback, local, multicast and discard addresses lie outside.
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(
    ipaddress.IPv6Network(block)
    for block in (
        "2001::/23",  # IETF protocol assignments: Teredo, benchmarking, ORCHID, anycast services
        "2001:db8::/32",  # documentation
        "2620:4f:8000::/48",  # AS112, delegated directly
        "3fff::/20",  # documentation
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: IPAddress) -> bool:
    """Return whether an address is on the public internet. An IPv6 address that embeds an IPv4
    address is judged by the embedded one.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in block for block in _NOT_PUBLIC_4)
    inner = address.ipv4_mapped or address.sixtofour
    if address in _NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if inner is not None:
        return is_public(inner)
    return address in _UNICAST_6 and not any(address in block for block in _NOT_PUBLIC_6)

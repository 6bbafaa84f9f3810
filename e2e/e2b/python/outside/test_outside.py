"""What leaves a sandbox, as packets: the outside is a network of the suite's own, with two addresses that answer."""

import os

import pytest

from e2b import ALL_TRAFFIC, Sandbox

ONE, OTHER = os.environ["SUITE_OUTSIDE"].split(",")


def reaches(sbx):
    """Which of the two addresses answer."""
    script = "import socket, sys\nfor host in sys.argv[1:]:\n  try: print(socket.create_connection((host, 80), 2).recv(99).decode().strip())\n  except OSError: pass"
    sbx.files.write("/tmp/reach.py", script)
    return sbx.commands.run(f"python3 /tmp/reach.py {ONE} {OTHER}").stdout.split()


@pytest.mark.proves("Sandbox.create")
def test_S0_64_addresses_are_allowed_and_denied(make):
    assert reaches(make()) == [ONE, OTHER]
    assert reaches(make(network={"allow_out": [OTHER], "deny_out": [ALL_TRAFFIC]})) == [OTHER]
    assert reaches(make(network={"deny_out": [ONE + "/32"]})) == [OTHER]
    assert reaches(make(allow_internet_access=False)) == []
    assert reaches(make(allow_internet_access=False, network={"allow_out": [ONE]})) == [ONE]


@pytest.mark.proves("Sandbox.update_network")
def test_S0_64_rules_change_while_it_runs(make):
    sbx = make()
    for network, want in (
        ({"deny_out": [ONE]}, [OTHER]),
        ({"allow_out": [ONE], "deny_out": [ALL_TRAFFIC]}, [ONE]),
        ({"deny_out": [ALL_TRAFFIC]}, []),
        ({"allow_internet_access": False}, []),
        ({}, [ONE, OTHER]),
    ):
        sbx.update_network(network)
        assert reaches(sbx) == want, network
    Sandbox.update_network(sbx.sandbox_id, {"deny_out": [OTHER]})
    assert reaches(sbx) == [ONE]

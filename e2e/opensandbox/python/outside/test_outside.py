"""What leaves a sandbox, as packets: the outside is a network of the suite's own, with two addresses that answer."""

import os

import pytest

from conftest import out
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule

proves = pytest.mark.proves

ONE, OTHER = os.environ["SUITE_OUTSIDE"].split(",")


def reaches(sbx, host):
    script = f"import socket; print(socket.create_connection(('{host}', 80), 2).recv(99).decode(), end='')"
    return out(sbx.commands.run(f'python3 -c "{script}" 2>/dev/null')) == [host]


def rules(policy):
    return policy.default_action, [(r.action, r.target) for r in policy.egress or []]


@proves("Sandbox.create", "Sandbox.get_egress_policy", "Sandbox.patch_egress_rules", "Sandbox.delete_egress_rules")
def test_S3_47_a_policy_at_create_and_changes_while_it_runs(make):
    sbx = make(network_policy=NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target=OTHER + "/32")]))
    assert rules(sbx.get_egress_policy()) == ("deny", [("allow", OTHER + "/32")])
    assert (reaches(sbx, ONE), reaches(sbx, OTHER)) == (False, True)
    sbx.patch_egress_rules([NetworkRule(action="allow", target=ONE)])
    assert {("allow", ONE), ("allow", OTHER + "/32")} == set(rules(sbx.get_egress_policy())[1])
    assert (reaches(sbx, ONE), reaches(sbx, OTHER)) == (True, True)
    sbx.patch_egress_rules([NetworkRule(action="deny", target=ONE)])
    assert (reaches(sbx, ONE), reaches(sbx, OTHER)) == (False, True)
    sbx.delete_egress_rules([ONE, OTHER + "/32", "192.0.2.1"])
    assert rules(sbx.get_egress_policy()) == ("deny", [])
    assert (reaches(sbx, ONE), reaches(sbx, OTHER)) == (False, False)


@proves("Sandbox.get_egress_policy", "Sandbox.patch_egress_rules")
def test_S3_47_a_sandbox_without_a_policy_has_one_that_can_be_changed(make):
    sbx = make()
    assert (reaches(sbx, ONE), reaches(sbx, OTHER)) == (True, True)
    assert rules(sbx.get_egress_policy())[0] == "allow"
    sbx.patch_egress_rules([NetworkRule(action="deny", target=ONE)])
    assert rules(sbx.get_egress_policy()) == ("allow", [("deny", ONE)])
    assert (reaches(sbx, ONE), reaches(sbx, OTHER)) == (False, True)

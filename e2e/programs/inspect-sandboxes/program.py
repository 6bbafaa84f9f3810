"""inspect-sandboxes: its provider for E2B under the checks that inspect_ai publishes for providers."""

import asyncio

from inspect_ai.util._sandbox import self_check
from inspect_sandboxes.e2b._e2b import E2BSandboxEnvironment

from steps import Steps

step = Steps("inspect-sandboxes")

# What a provider on E2B's protocol gets wrong, with Cove's server and by E2B's rules alike.
ROOT = "the provider runs everything as root, whom no permission stops"
PLACES = "commands begin in the template's directory, and relative names of files in the home of the user, who is root here"
FAULTS = {
    "test_read_file_zero_length": PLACES,
    "test_exec_input_binary": PLACES,
    "test_cwd_unspecified": PLACES,
    "test_read_file_not_allowed": ROOT,
    "test_write_text_file_without_permissions": ROOT,
    "test_write_binary_file_without_permissions": ROOT,
    "test_exec_timeout_not_raised_on_fast_signal_death": "the protocol's exit code of a command that a signal ended is -1",
    "test_exec_permission_error": "the provider takes a program that may not be run for one that ended with 126",
    "test_exec_large_command": "the SDK sends a command as one argument of bash, and Linux takes 128 KiB in one",
    "test_exec_as_nonexistent_user": "the provider lets the SDK's exception pass",
}


async def main():
    with step("task_init"):
        await E2BSandboxEnvironment.task_init("trial", None)
    with step("sample_init"):
        made = await E2BSandboxEnvironment.sample_init("trial", None, {})
    for name, check in vars(self_check).items():
        if name.startswith("test_"):
            with step(name.removeprefix("test_").replace("_", " "), fault=FAULTS.get(name)):
                await check(made["default"])
    with step("sample_cleanup"):
        await E2BSandboxEnvironment.sample_cleanup("trial", None, made, False)
    with step("task_cleanup"):
        await E2BSandboxEnvironment.task_cleanup("trial", None, True)


asyncio.run(main())

"""Does a snippet run at all, and without what its caller has in the environment?"""

import os

from cove.otel import run_snippet

os.environ["PYTHONPATH"] = "/of/the/caller"

power = run_snippet("print(2 ** 10)")
if (power.exit_code, power.stdout) != (0, "1024\n"):
    raise SystemExit(f"2 ** 10 is wrong: {power}")

path = run_snippet("import os\nprint('PYTHONPATH' in os.environ)")
if path.stdout != "False\n":
    raise SystemExit(f"PYTHONPATH went along: {path}")

print("snippets run: 1024, no PYTHONPATH")

"""Does a span appear on the stdout that is there when it ends, rather than on the one of the start?"""

import io
import sys

from cove.otel import configure_tracing, traced_run

tracer = configure_tracing()
console, sys.stdout = sys.stdout, io.StringIO()
try:
    ran = traced_run(tracer, "print('ahoy')")
finally:
    shown, sys.stdout = sys.stdout.getvalue(), console

missing = [word for word in ("sandbox.exec", "sandbox.exit_code") if word not in shown]
if missing or ran.exit_code != 0:
    raise SystemExit(f"exit code {ran.exit_code}, not shown: {missing}")
print("a span was shown; the snippet said", ran.stdout.strip())

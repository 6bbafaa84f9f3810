"""A receiver of OTLP, gRPC and HTTP, for the tests of cove.otel."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry import trace


@pytest.fixture(autouse=True)
def nobody_elses_tracing(monkeypatch):
    """Settings of this machine do not count, and no provider of a test becomes that of the whole process, which other suites share."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)


class Collector:
    """Keeps every request of spans that it gets."""

    def __init__(self):
        import grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as wire
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

        self.received = received = []

        class Service(service.TraceServiceServicer):
            def Export(self, request, context):
                received.append(request)
                return wire.ExportTraceServiceResponse()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                received.append(wire.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._grpc = grpc.server(ThreadPoolExecutor(2))
        service.add_TraceServiceServicer_to_server(Service(), self._grpc)
        self._port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def address(self, protocol):
        return f"http://127.0.0.1:{self._port if protocol == 'grpc' else self._http.server_address[1]}"

    def close(self):
        self._grpc.stop(None).wait()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def collector():
    receiver = Collector()
    yield receiver
    receiver.close()

"""Terminals over WebSocket: no SDK wraps them, so this speaks the protocol."""

import json
import time

import pytest
import websockets.exceptions
import websockets.sync.client

proves = pytest.mark.proves


class Terminal:
    def __init__(self, wire, sandbox, **body):
        self.wire, self.endpoint = wire, sandbox.get_endpoint(44772)
        made = wire.at(self.endpoint, "POST", "/pty", json=body)
        assert made.status_code == 201, made.text
        self.id = made.json()["session_id"]

    def attach(self, query="pty=1"):
        return websockets.sync.client.connect(f"ws://{self.endpoint.endpoint}/pty/{self.id}/ws?{query}", additional_headers=self.endpoint.headers)

    def status(self):
        return self.wire.at(self.endpoint, "GET", f"/pty/{self.id}")

    def delete(self):
        return self.wire.at(self.endpoint, "DELETE", f"/pty/{self.id}")


def read_until(ws, word, seconds=100):
    """Binary output until a word is in it; text messages are kept apart."""
    data, texts = b"", []
    end = time.monotonic() + seconds
    while word not in data:
        message = ws.recv(timeout=max(0.1, end - time.monotonic()))
        if isinstance(message, str):
            texts.append(json.loads(message))
        elif message[0] == 3:
            data += message[9:]
        else:
            data += message[1:]
    return data, texts


@proves("PTY over WebSocket")
def test_a_terminal_speaks_and_is_resized(wire, sandbox):
    terminal = Terminal(wire, sandbox, cwd="/tmp")
    with terminal.attach() as ws:
        connected = json.loads(ws.recv(timeout=100))
        assert connected == {"type": "connected", "session_id": terminal.id, "mode": "pty"}
        ws.send(json.dumps({"type": "resize", "cols": 101, "rows": 33}))
        ws.send(b"\x00stty size; tty; pwd\n")
        data, _ = read_until(ws, b"/tmp\r\n")
        assert b"33 101" in data and b"/dev/pts/" in data
        ws.send(json.dumps({"type": "ping"}))
        while True:
            message = ws.recv(timeout=100)
            if isinstance(message, str):
                assert json.loads(message)["type"] == "pong"
                break
        assert terminal.status().json()["running"] is True
        ws.send(json.dumps({"type": "stdin", "data": "exit 7\n"}))
        texts = []
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            while True:
                message = ws.recv(timeout=100)
                if isinstance(message, str):
                    texts.append(json.loads(message))
        assert texts[-1] == {"type": "exit", "exit_code": 7}
    assert terminal.delete().status_code == 200
    assert terminal.status().status_code == 404


@proves("PTY over WebSocket")
def test_a_terminal_is_left_and_found_again(wire, sandbox):
    terminal = Terminal(wire, sandbox)
    with terminal.attach() as ws:
        ws.send(b"\x00A=kept; echo said-$((40+2))\n")
        read_until(ws, b"said-42")
    with terminal.attach("pty=1&since=0") as ws:
        data, _ = read_until(ws, b"said-42")
        ws.send(b"\x00echo $A-again\n")
        read_until(ws, b"kept-again")
        with pytest.raises(websockets.exceptions.InvalidStatus) as second:
            terminal.attach()
        assert second.value.response.status_code == 409
        with terminal.attach("pty=1&takeover=1") as taken:
            taken.send(b"\x00echo taken-$A\n")
            read_until(taken, b"taken-kept")
        with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
            while True:
                ws.recv(timeout=100)
        assert closed.value.rcvd.code == 4001
    terminal.delete()


@proves("PTY over WebSocket")
def test_pipes_keep_the_streams_apart(wire, sandbox):
    terminal = Terminal(wire, sandbox, command="echo out; echo err >&2")
    streams = {1: b"", 2: b""}
    with terminal.attach("pty=0") as ws:
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            while True:
                message = ws.recv(timeout=100)
                if isinstance(message, bytes):
                    streams[message[0]] += message[1:]
    assert streams == {1: b"out\n", 2: b"err\n"}

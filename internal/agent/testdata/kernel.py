"""A kernel that does what a test tells it: well-behaved or not."""
import array, fcntl, json, os, signal, socket, struct, sys, termios, time

sock = socket.socket(fileno=3)


def frame(kind, payload):
    sock.sendall(struct.pack(">B3xI", kind, len(payload)) + payload)


def event(**fields):
    frame(2, json.dumps(fields).encode())


def read(n):
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            sys.exit(0)
        data += part
    return data


def end(outcome="ok"):
    event(type="end", end={"outcome": outcome})


signal.signal(signal.SIGINT, signal.default_int_handler)
event(type="ready", pid=os.getpid(), message="plain")
while True:
    kind, size = struct.unpack(">B3xI", read(8))
    request = json.loads(read(size))
    event(type="started", count=1)
    word, _, rest = request["code"].partition(" ")
    try:
        if word == "echo":
            os.write(1, rest.encode())
            event(type="result", result={"data": {"text/plain": json.dumps(rest).strip('"')}, "main": True})
            end()
        elif word == "sleep":
            time.sleep(float(rest))
            end()
        elif word == "reluctant":  # takes its time to stop, without a processor
            os.write(1, b"go")
            try:
                time.sleep(1000)
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                time.sleep(float(rest))
                signal.signal(signal.SIGINT, signal.default_int_handler)
        elif word == "deaf":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.write(1, b"go")
            while True:
                pass
        elif word == "exit":
            os._exit(int(rest))
        elif word == "close":
            sock.shutdown(socket.SHUT_RDWR)
            time.sleep(100)
        elif word == "raw":
            sock.sendall(bytes.fromhex(rest))
            time.sleep(100)
        elif word == "send":
            frame(2, rest.encode())
            time.sleep(100)
        elif word == "flood":
            for _ in range(int(rest)):
                event(type="notice", message="x")
            end()
        elif word == "after":
            end()
            for _ in range(int(rest)):
                event(type="notice", message="x")
        elif word == "huge":
            frame(2, b"x" * (17 << 20))
        elif word == "late":
            end()
            count, go, done = rest.split()
            while not os.path.exists(go):
                time.sleep(0.001)
            data = b"y" * int(count)
            while data:
                data = data[os.write(1, data):]
            left = array.array("i", [1])
            while left[0]:  # until the agent has taken all of it
                fcntl.ioctl(1, termios.FIONREAD, left)
            open(done, "w").close()
        elif word == "orphan":  # leaves a child that holds the socket, and dies without reading it again
            if os.fork() == 0:
                signal.alarm(10)
                signal.pause()
            while not os.path.exists(rest):
                time.sleep(0.001)
            time.sleep(0.5)  # so that the next cell waits for this one, and is sent by whoever hears its end
            end()
            os._exit(3)
        else:
            end("error")
    except KeyboardInterrupt:
        end("interrupted")

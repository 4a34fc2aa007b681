"""A process that keeps the plane's side of the bargain and nothing more; its target says how it behaves.

Standard library only, so that it starts at once.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

order = json.loads(sys.stdin.readline())
behaviour, _, detail = order["target"].partition("-")
folder = order["folder"]


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def serve(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        connection.recv(65536)
        body = json.dumps(order).encode()
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
        )
        connection.close()


def note(line: str) -> None:
    with open(os.path.join(folder, "lines"), "a") as lines:
        lines.write(line)


if behaviour == "refuse":
    say(error="no module named 'nowhere'")
    sys.exit(1)
if behaviour == "die":
    print("the sky is falling", file=sys.stderr, flush=True)
    sys.exit(3)
if behaviour == "once":
    # Dies unless another has died before it.
    marker = os.path.join(os.path.dirname(folder), "died")
    if not os.path.exists(marker):
        open(marker, "w").close()
        sys.exit(3)
if behaviour == "hang":
    time.sleep(600)
if behaviour == "slow":
    time.sleep(float(detail))
if behaviour == "parent":
    child = subprocess.Popen(["sleep", "600"], start_new_session=False)
    with open(os.path.join(folder, "child"), "w") as file:
        file.write(str(child.pid))
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
listening = socket.create_server((order["host"], 0))
threading.Thread(target=serve, args=(listening,), daemon=True).start()
say(port=listening.getsockname()[1])
while behaviour == "stubborn":
    time.sleep(600)
for line in sys.stdin:
    note(line)

"""Run one command and leave nothing of it behind. Stands alone: its text is also sent to hosts.

    python guard.py [--relay] [--silence S] GRACE PROGRAM [ARGUMENT ...]

The command runs in a session of its own, without input. The guard listens to its own input: a
``T`` (or SIGTERM) tells the command to end, by SIGTERM, and kills it GRACE seconds later; a ``K``
kills it now. When the input closes (whoever started this is gone, were it by SIGKILL), or the
terminal hangs up, the command has LOST_S seconds. Whatever the command started is killed when it
has ended; on Linux also what went into sessions of its own, for orphans come to the guard. The exit
code is the command's, 128 + the signal if one ended it, 127 if there is no such program.

With ``--relay`` the command is another guard's connection (ssh): a ``T`` and a ``K`` are handed on
to its input, with a beat every few seconds. With ``--silence S`` no beat for S seconds counts as a
closed input.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import termios
import time

LOST_S = 5.0
BEAT_S = 5.0
RELAYED_S = 10.0
DEATH_SIGNAL, SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Linux's prctl; nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become(command: list[str], given: int, output: int) -> None:
    """Become the command; does not return."""
    parent = os.getppid()
    os.setsid()
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(137)
    for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(given, 0)
    if output >= 0:
        os.dup2(output, 1)
        os.dup2(output, 2)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)


def quiet_terminal() -> None:
    """No echo of what is read, no carriage returns in what is written."""
    with contextlib.suppress(termios.error):
        modes = termios.tcgetattr(0)
        modes[1] &= ~termios.OPOST
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, modes)


def sweep(group: int) -> None:
    """Kill what is left: the command's group, and orphans that came to this process."""
    until = time.monotonic() + LOST_S
    own = f"/proc/self/task/{os.getpid()}/children"
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        with contextlib.suppress(OSError), open(own) as file:
            for pid in file.read().split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def write(file: int, data: bytes) -> None:
    """Write all of it; nobody reading is no error."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(file, data) :]


class Guard:
    """One command, and what was heard about it."""

    def __init__(self, command: list[str], grace: float, relay: bool, silence: float) -> None:
        self.grace, self.relay, self.silence = grace, relay, silence
        self.wake = self.signals()
        prctl(SUBREAPER, 1)
        self.copied, output = -1, -1
        if os.isatty(1):  # programs write other things to a terminal than to a log
            quiet_terminal()
            self.copied, output = os.pipe()
        given, self.handed = os.pipe() if relay else (os.open(os.devnull, os.O_RDONLY), -1)
        self.pid = os.fork()
        if self.pid == 0:
            become(command, given, output)
        os.close(given)
        if output >= 0:
            os.close(output)
        self.deadline = float("inf")
        self.told, self.listening = False, True
        self.heard = self.beat = time.monotonic()

    @staticmethod
    def signals() -> int:
        """Turn signals into bytes; returns the file to read them from."""
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        return wake

    def end(self, seconds: float, by_hand: bool) -> None:
        """Tell the command to end, once, and let it be killed after some seconds."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        if self.relay and by_hand:
            write(self.handed, b"T\n")
        elif self.relay or not self.told:
            self.kill(signal.SIGTERM)
        self.told = True

    def kill(self, number: int) -> None:
        """A signal to the command's group."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)

    def lost(self) -> None:
        """Nobody is there any more who started this."""
        self.listening = False
        self.end(LOST_S, False)

    def listen(self) -> None:
        """Do what the input says."""
        try:
            data = os.read(0, 4096)
        except OSError:
            data = b""
        self.heard = time.monotonic()
        if not data:
            self.lost()
        if b"T" in data:
            self.end(self.grace + (RELAYED_S if self.relay else 0), True)
        if b"K" in data:
            if self.relay:
                write(self.handed, b"K\n")
            self.deadline = self.heard + (LOST_S if self.relay else 0)

    def copy(self) -> None:
        """Hand on a piece of the command's output."""
        data = os.read(self.copied, 65536)
        write(1, data)
        if not data:
            os.close(self.copied)
            self.copied = -1

    def wait(self) -> None:
        """Wait for a moment, and do what came."""
        sources = [self.wake]
        sources += [0] if self.listening else []
        sources += [self.copied] if self.copied >= 0 else []
        left = max(0.0, min(1.0, self.deadline - time.monotonic()))
        ready = select.select(sources, [], [], left)[0]
        if self.copied in ready:
            self.copy()
        if 0 in ready:
            self.listen()
        for number in os.read(self.wake, 512) if self.wake in ready else b"":
            if number in (signal.SIGTERM, signal.SIGINT):
                self.end(self.grace, True)
            elif number == signal.SIGHUP:
                self.lost()

    def run(self) -> int:
        """Until the command has ended; its exit code."""
        code = None
        while code is None:
            self.wait()
            now = time.monotonic()
            if self.listening and now - self.heard > self.silence:
                self.lost()
            if self.relay and now - self.beat > BEAT_S:
                self.beat = now
                write(self.handed, b"\n")
            if now >= self.deadline:
                self.kill(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(-1, os.WNOHANG)
                while ended:
                    code = os.waitstatus_to_exitcode(status) if ended == self.pid else code
                    ended, status = os.waitpid(-1, os.WNOHANG)
        sweep(self.pid)
        while self.copied >= 0:
            self.copy()
        return 128 - code if code < 0 else code


def main(words: list[str]) -> int:
    """Run the command; returns its exit code."""
    relay = words[0] == "--relay"
    words = words[1:] if relay else words
    silence = float("inf")
    if words[0] == "--silence":
        silence, words = float(words[1]), words[2:]
    return Guard(words[1:], float(words[0]), relay, silence).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

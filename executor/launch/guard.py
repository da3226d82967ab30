"""Run one command and leave no process behind. Stands alone: its text is also sent to hosts.

    python guard.py [FLAG ...] GRACE PROGRAM [ARGUMENT ...]

The command runs in a new session, without input. The guard reads commands from its standard input:
a ``T`` (or SIGTERM) sends SIGTERM to the command, and kills it GRACE seconds later; a ``K`` kills
it now. When the input closes (the process that started the guard has ended, even by SIGKILL), or
the terminal hangs up, the command has LOST_S seconds. When the command has ended, the guard kills
all processes that it started; on Linux also those in other sessions, because orphans become
children of the guard. The exit code is the command's, 128 + the signal if one ended it, 127 if
there is no such program.

The command may be a program that starts guards on other hosts. With ``--relay`` (ssh, srun) the
guard forwards a ``T`` and a ``K`` to its input, and sends a heartbeat every few seconds. With
``--usr1`` (mpirun) a ``T`` sends it SIGUSR1, which a guard treats like SIGTERM. On the other side,
with ``--silence S`` no heartbeat for S seconds counts as a closed input; with ``--deaf`` there is
no input; with ``--report`` a last line gives the exit code, if it is not 0, for readers that see
only the output.
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
LONG = 8192
REPORT = "\x1eexit code "
TAKEN = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
DEATH_SIGNAL, SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; does nothing on other systems."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become(command: list[str], given: int, output: int) -> None:
    """Become the command; does not return."""
    parent = os.getppid()
    os.setsid()
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(137)
    for number in (signal.SIGPIPE, *TAKEN):
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
    """Turn off the echo of input and carriage returns in output."""
    with contextlib.suppress(termios.error):
        modes = termios.tcgetattr(0)
        modes[1] &= ~termios.OPOST
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, modes)


def kill_leftovers(group: int) -> None:
    """Kill leftover processes: the command's group, and orphans that this process inherited."""
    until = time.monotonic() + LOST_S
    children_file = f"/proc/self/task/{os.getpid()}/children"
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        with contextlib.suppress(OSError), open(children_file) as file:
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
    """Write all data; a closed reader is not an error."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(file, data) :]


class Guard:
    """One command, and the state of its guard."""

    def __init__(self, command: list[str], grace: float, flags: list[str], silence: float) -> None:
        self.grace, self.silence = grace, silence
        self.relay, self.report = "--relay" in flags, "--report" in flags
        self.usr1, self.listening = "--usr1" in flags, "--deaf" not in flags
        self.wake = self.signals()
        prctl(SUBREAPER, 1)
        self.copied, output, self.part, self.newline = -1, -1, b"", ""
        if self.report or os.isatty(1):  # programs write differently to a terminal than to a log
            quiet_terminal()
            self.copied, output = os.pipe()
        given, self.handed = os.pipe() if self.relay else (os.open(os.devnull, os.O_RDONLY), -1)
        self.pid = os.fork()
        if self.pid == 0:
            become(command, given, output)
        os.close(given)
        if output >= 0:
            os.close(output)
        self.deadline = float("inf")
        self.told = False
        self.heard = self.beat = time.monotonic()

    @staticmethod
    def signals() -> int:
        """Turn signals into bytes; returns the file to read them from."""
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        for number in TAKEN:
            signal.signal(number, lambda *_: None)
        return wake

    def end(self, seconds: float, by_hand: bool) -> None:
        """Signal the command to end, and set its deadline: it is killed after some seconds."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        if self.relay and by_hand:
            write(self.handed, b"T\n")
        elif self.usr1 and by_hand:
            os.kill(self.pid, signal.SIGUSR1)
        elif self.relay or self.usr1 or not self.told:
            self.kill(signal.SIGTERM)
        self.told = True

    def kill(self, number: int) -> None:
        """Send a signal to the command's group."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, number)

    def lost(self) -> None:
        """Handle the end of the process that started this one."""
        self.listening = False
        self.end(LOST_S, False)

    def listen(self) -> None:
        """Read the input and act on it."""
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
        """Forward the command's output, in whole lines unless they are longer than LONG bytes."""
        data = os.read(self.copied, 65536)
        self.part += data
        end = self.part.rfind(b"\n") + 1
        if not data or len(self.part) > LONG:
            end = len(self.part)
        write(1, self.part[:end])
        if end:
            self.newline = "" if self.part[:end].endswith(b"\n") else "\n"
        self.part = self.part[end:]
        if not data:
            os.close(self.copied)
            self.copied = -1

    def wait(self) -> None:
        """Wait for events for up to a second, and handle them."""
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
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                self.end(self.grace, True)
            elif number == signal.SIGHUP:
                self.lost()

    def run(self) -> int:
        """Run until the command has ended; returns its exit code."""
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
        kill_leftovers(self.pid)
        while self.copied >= 0:
            self.copy()
        code = 128 - code if code < 0 else code
        if self.report and code:
            write(1, f"{self.newline}{REPORT}{code}\n".encode())
        return code


def main(words: list[str]) -> int:
    """Run the command; returns its exit code."""
    silence, flags = float("inf"), []
    while words[0].startswith("--"):
        flags.append(words.pop(0))
        if flags[-1] == "--silence":
            silence = float(words.pop(0))
    return Guard(words[1:], float(words[0]), flags, silence).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

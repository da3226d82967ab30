"""Files of hosts, who goes where, and the commands that ssh is given. Nothing is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor.launch.hosts import ssh
from executor.launch.hosts.hostfile import Host, parse_hosts, places, read_hosts, room
from executor.launch.hosts.ssh import Ssh, address, tasks
from executor.launch.job import Job, LaunchError
from executor.processes.hello import read_secret


def test_a_file_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all\n\nnode0 slots=4\nme@node1 slots=2 port=2222 # new\n10.0.0.7 user=you\n")
    assert read_hosts(path) == (
        Host("node0", 4),
        Host("node1", 2, 2222, "me"),
        Host("10.0.0.7", user="you"),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\nb slots=0", "hosts, line 2: slots=0, a whole number from 1"),
        ("a slots=x", "line 1: slots=x"),
        ("a port=70000", "line 1: port=70000"),
        ("\n\na gpus=2", "line 3: got 'gpus=2'"),
        ("a b", "line 1: got 'b'"),
        ("a slots=1 slots=2", "slots is given twice"),
        ("me@a user=you", "user is given twice"),
        ("-oProxyCommand=x", "is no host"),
        ("a;b", "'a;b' is no host"),
        ("# nobody\n", "names no host"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(text: str, told: str) -> None:
    with pytest.raises(LaunchError, match=r"expected: HOST \[slots=K\]") as error:
        parse_hosts(text, "hosts")
    assert told in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot read the hosts in .*No such file"):
        read_hosts(tmp_path / "none")


def test_slots_are_filled_host_after_host() -> None:
    a, b, c = Host("a", 2), Host("b"), Host("c", 3)
    found = places(room((a, b, c), 5), 5)
    assert [(place.host.name, place.local) for place in found] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("c", 0),
        ("c", 1),
    ]
    assert len(places(room((a, b), 5), 5)) == 3


def test_without_slots_hosts_get_equal_parts_and_a_name_counts_on() -> None:
    found = places(room((Host("a"), Host("b"), Host("a", port=2)), 7), 7)
    assert "".join(place.host.name for place in found) == "aaabbaa"
    assert [place.local for place in found] == [0, 1, 2, 0, 1, 3, 4]


def test_the_command_for_a_host() -> None:
    ssh = Ssh((Host("b", port=22, user="me"),), "/a b", "/py", ("-i", "key"))
    job = Job(("/here/python", "t.py", "x y"), 1, 4, {"K": "it's"}, stop_s=7)
    (task,) = tasks(ssh, job, 2, places(room(ssh.hosts, 1), 1), "b:99")
    *words, command = task.command
    assert words[:4] == ["ssh", "-tt", "-i", "key"]
    assert words[-5:] == ["-p", "22", "-l", "me", "b"]
    assert "BatchMode=yes" in words and task.flags == ("--relay",) and task.host == "b"
    assert command.startswith("cd '/a b' && exec env 'K=it'\"'\"'s' MESHWRIGHT_RESTART=2 ")
    for told in ("JAX_NUM_CPU_DEVICES=4", "MESHWRIGHT_COORDINATOR=b:99", "MESHWRIGHT_PROCESS=0"):
        assert f" {told} " in command
    assert command.endswith(" --silence 60.0 7 /py t.py 'x y'")


def test_a_first_host_that_means_each_host_itself_is_refused() -> None:
    local, other = Host("127.0.0.1"), Host("10.0.0.1")
    assert address(local, [local, Host("127.0.0.2")], ()) == "127.0.0.1"
    assert address(Host("::1"), [], ()) == "[::1]"
    assert address(other, [other, local], ()) == "10.0.0.1"
    with pytest.raises(LaunchError, match=r"process 0 would be on 127\.0\.0\.1"):
        address(local, [local, other], ())


def test_a_secret_goes_by_a_file_that_only_its_user_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "ssh"
    fake.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    name = ssh.hand_secret([Host("a")], "abc", ())
    file = Path(name).expanduser()
    assert (file.read_text(), file.stat().st_mode & 0o077) == ("abc", 0)
    assert read_secret({"MESHWRIGHT_SECRET_ONCE": name}) == b"abc"

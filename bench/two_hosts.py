"""Two hosts on one machine, for `bench.faults`: network namespaces, each with a name and an address, and a cable."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NAMES = ("jscaler0", "jscaler1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def on_host(number: int, hosts: Path, words: Sequence[str]) -> list[str]:
    """The words of a command that runs there, and is that process itself.

    Args:
        hosts: the file that `two_hosts` gives.
    """
    name = NAMES[number]
    set_up = f'mount --bind "{hosts}" /etc/hosts && hostname {name} && exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", set_up, "sh", *words]


@contextmanager
def two_hosts(folder: Path) -> Iterator[Path | None]:
    """While it is open, there are both; gives the file that says their addresses, or None where this user may not."""
    hosts = folder / "hosts"
    own = zip(ADDRESSES, NAMES, strict=True)
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in own))
    try:
        yield hosts if _made() else None
    finally:
        for name in NAMES:
            _ip(f"netns del {name}")


def cable(up: bool) -> None:
    """Plug it in, or pull it out."""
    for name in NAMES:
        _ip(f"-n {name} link set {name} {'up' if up else 'down'}")


def _made() -> bool:
    first, second = NAMES
    commands = [f"netns add {name}" for name in NAMES]
    commands.append(f"link add {first} netns {first} type veth peer name {second} netns {second}")
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        commands += [
            f"-n {name} addr add {address}/24 dev {name}",
            f"-n {name} link set lo up",
            f"-n {name} link set {name} up",
        ]
    return all(map(_ip, commands))


def _ip(words: str) -> bool:
    try:
        return not subprocess.run(["ip", *words.split()], capture_output=True, check=False).returncode
    except OSError:
        return False

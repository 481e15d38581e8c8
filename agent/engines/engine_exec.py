"""The last step before an engine's program: tie it to the agent, close it in, exec.

  python -I engine_exec.py --parent PID [--loopback] [--hide DIR] [--keep DIR]... [--drop-capabilities] -- ARGV...

A program of its own, because Python code between fork and exec may deadlock in
a process that has threads. It uses the standard library only, so that any
interpreter runs it without a package path.

--parent PID          die with that process: SIGKILL when the thread of it that started this one ends.
--loopback            raise the loopback interface of a new network namespace; NCCL and torch rendezvous there.
--hide DIR            cover DIR with an empty file system; needs a mount namespace of its own.
--keep DIR            leave DIR, which lies below the hidden one, as it is.
--drop-capabilities   give up, for good, what a new user namespace granted, so that nothing can be uncovered.
"""

import argparse
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

# From <linux/prctl.h>, <linux/mount.h> and <linux/sockios.h>; part of the kernel's stable interface.
_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_MS_BIND_RECURSIVE = 4096 | 16384
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
# struct ifreq: the interface name, then a union that is 24 bytes long.
_IFREQ = "16sh22x"
# The kernel numbers capabilities from 0 without gaps and answers EINVAL past the last one.
_CAPABILITIES_MAX = 64

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL at the parent's end; leave at once where it has ended already."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(f"the agent {parent_pid} ended before its engine started")


def clear_ambient_capabilities() -> None:
    """Keep from the engine what a service was granted to set power limits: at the next exec it is gone."""
    _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(PR_CAP_AMBIENT)")


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack(_IFREQ, b"lo", 0)
        _, flags = struct.unpack(_IFREQ, fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack(_IFREQ, b"lo", flags | _IFF_UP))


def hide(directory: str, keep: list[str]) -> None:
    """Cover `directory` with an empty tmpfs and bind the kept directories back in."""
    kept = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in keep]
    _mount("tmpfs", directory, "tmpfs", _MS_NOSUID_NODEV_NOEXEC)
    for path, descriptor in kept:
        os.makedirs(path, mode=0o700, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, None, _MS_BIND_RECURSIVE)
        os.close(descriptor)


def drop_capabilities() -> None:
    """Empty the bounding set: at the next exec nothing is left, and no file can give anything back."""
    for capability in range(_CAPABILITIES_MAX):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = None if kind is None else kind.encode()
    result = _libc.mount(source.encode(), os.fsencode(target), encoded, ctypes.c_ulong(flags), None)
    _check(result, f"mount on {target}")


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--hide")
    parser.add_argument("--keep", action="append", default=[])
    parser.add_argument("--drop-capabilities", action="store_true")
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    die_with_parent(options.parent)
    clear_ambient_capabilities()
    if options.loopback:
        raise_loopback()
    if options.hide is not None:
        hide(options.hide, options.keep)
    if options.drop_capabilities:
        drop_capabilities()
    try:
        os.execvpe(options.argv[0], options.argv, os.environ)
    except OSError as error:
        sys.exit(f"cannot start {options.argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main()

"""A file system in user space (FUSE) that shows a folder of this machine, and fails as network file systems do.

    python tests/board/mount.py FOLDER MOUNT_POINT

Mounts `FOLDER` at `MOUNT_POINT`, in the mount namespace of this process, and serves it with the kernel's own protocol
(linux/fuse.h). Each line of the standard input is an order, answered by one of the output: `errno N` (every request
that is served from then on fails), `errno-writes N` (those that change something), `silence` (no request is read any
more, so a process that asks waits), `heal`. Its end is the end of the standard input, or that of the mount.
"""

import ctypes
import errno
import os
import select
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path

_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_MOST_WRITE = 1 << 20
_HANDLES = {14: "open", 27: "opendir", 35: "create"}
_WRITES = {4, 6, 8, 9, 10, 11, 12, 13, 16, 20, 30, 35, 43, 45}  # opcodes that change something
_FORGET, _INTERRUPT, _DESTROY, _BATCH_FORGET = 2, 36, 38, 42
_SILENT = (_FORGET, _INTERRUPT, _BATCH_FORGET)
# Of SETATTR: which attributes are set.
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _HANDLE, _ATIME_NOW, _MTIME_NOW = (1 << bit for bit in range(9))
_MS_NOSUID, _MS_NODEV = 2, 4


class Mirror:
    """The folder `top` as answers to requests. A node is a file with a descriptor of its own (O_PATH), so that it can
    be renamed and removed while it is open."""

    def __init__(self, top: Path):
        self._nodes = {1: os.open(top, os.O_PATH)}
        self._numbers = {self._key(self._nodes[1]): 1}
        self._lists: dict[int, list[tuple[str, int]]] = {}
        self._next = 2

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        """Return the answer to a request. Raises OSError, with ENOSYS for what this file system does not have. FLUSH is
        such a request: the kernel would wait for its answer in killed processes too, unlike network file systems."""
        if (act := _ACTS.get(opcode)) is None:
            raise OSError(errno.ENOSYS, "not served")
        return act(self, node, body)

    def _key(self, fd: int) -> tuple[int, int]:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self._nodes[node]}"

    def _entry(self, parent: int, name: str) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent])
        key = self._key(fd)
        if (node := self._numbers.get(key)) is None:
            node, self._next = self._next, self._next + 1
            self._numbers[key], self._nodes[node] = node, fd
        else:
            os.close(fd)
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + self._attributes(self._nodes[node])

    def _attributes(self, fd: int) -> bytes:
        s = os.fstat(fd)
        times = [divmod(ns, 10**9) for ns in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        seconds, rest = zip(*times, strict=True)
        numbers = (s.st_ino, s.st_size, s.st_blocks, *seconds, *rest)
        return _ATTR.pack(*numbers, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_rdev, s.st_blksize, 0)

    # -- requests: (node, body) -> answer --

    def init(self, node: int, body: bytes) -> bytes:
        major, minor, ahead, _ = struct.unpack_from("<IIII", body)
        return struct.pack("<IIIIHHIIHHI28x", major, min(minor, 31), ahead, 0, 16, 12, _MOST_WRITE, 1, 0, 0, 0)

    def lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(node, _names(body)[0])

    def getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(self._nodes[node])

    def setattr(self, node: int, body: bytes) -> bytes:
        what, _, handle, size, _, atime, mtime, _, anano, mnano, _, mode = struct.unpack_from("<IIQQQQQQIIII", body)
        uid, gid = struct.unpack_from("<II", body, 76)
        path = self._path(node)
        if what & _SIZE:
            os.truncate(handle if what & _HANDLE else path, size)
        if what & _MODE:
            Path(path).chmod(stat.S_IMODE(mode))
        if what & (_UID | _GID):
            os.chown(path, uid if what & _UID else -1, gid if what & _GID else -1)
        if what & (_ATIME_NOW | _MTIME_NOW):
            os.utime(path)
        elif what & (_ATIME | _MTIME):
            os.utime(path, ns=(atime * 10**9 + anano, mtime * 10**9 + mnano))
        return self.getattr(node, body)

    def mkdir(self, node: int, body: bytes) -> bytes:
        mode, _ = struct.unpack_from("<II", body)
        name = _names(body[8:])[0]
        os.mkdir(name, mode, dir_fd=self._nodes[node])
        return self._entry(node, name)

    def unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(_names(body)[0], dir_fd=self._nodes[node])
        return b""

    def rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(_names(body)[0], dir_fd=self._nodes[node])
        return b""

    def rename(self, node: int, body: bytes, skip: int = 8) -> bytes:
        target, (old, new) = struct.unpack_from("<Q", body)[0], _names(body[skip:])
        os.rename(old, new, src_dir_fd=self._nodes[node], dst_dir_fd=self._nodes[target])
        return b""

    def rename2(self, node: int, body: bytes) -> bytes:
        if struct.unpack_from("<I", body, 8)[0]:
            raise OSError(errno.EINVAL, "a rename with flags")
        return self.rename(node, body, 16)

    def link(self, node: int, body: bytes) -> bytes:
        source, name = struct.unpack_from("<Q", body)[0], _names(body[8:])[0]
        os.link(self._path(source), name, dst_dir_fd=self._nodes[node], follow_symlinks=True)
        return self._entry(node, name)

    def open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND)
        return struct.pack("<QII", os.open(self._path(node), flags), 0, 0)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        name = _names(body[16:])[0]
        fd = os.open(name, (flags | os.O_CREAT) & ~os.O_APPEND, stat.S_IMODE(mode), dir_fd=self._nodes[node])
        return self._entry(node, name) + struct.pack("<QII", fd, 0, 0)

    def read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(handle, size, offset)

    def write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def release(self, node: int, body: bytes) -> bytes:
        handle = struct.unpack_from("<Q", body)[0]
        self._lists.pop(handle, None)
        os.close(handle)
        return b""

    def fsync(self, node: int, body: bytes) -> bytes:
        return b""  # the folder is not to survive a loss of power

    def opendir(self, node: int, body: bytes) -> bytes:
        fd = os.open(self._path(node), os.O_RDONLY | os.O_DIRECTORY)
        with os.scandir(fd) as entries:
            self._lists[fd] = [(entry.name, entry.inode()) for entry in entries]
        return struct.pack("<QII", fd, 0, 0)

    def readdir(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        found = b""
        for number, (name, inode) in enumerate(self._lists[handle][offset:], offset + 1):
            data = name.encode()
            entry = struct.pack("<QQII", inode, number, len(data), 0) + data
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found

    def statfs(self, node: int, body: bytes) -> bytes:
        s = os.statvfs(self._path(node))
        blocks = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree)
        return struct.pack("<5Q4I24x", *blocks, s.f_bsize, s.f_namemax, s.f_frsize, 0)


_ACTS: dict[int, Callable[[Mirror, int, bytes], bytes]] = {
    1: Mirror.lookup,
    3: Mirror.getattr,
    4: Mirror.setattr,
    9: Mirror.mkdir,
    10: Mirror.unlink,
    11: Mirror.rmdir,
    12: Mirror.rename,
    13: Mirror.link,
    14: Mirror.open,
    15: Mirror.read,
    16: Mirror.write,
    17: Mirror.statfs,
    18: Mirror.release,
    20: Mirror.fsync,
    26: Mirror.init,
    27: Mirror.opendir,
    28: Mirror.readdir,
    29: Mirror.release,
    30: Mirror.fsync,
    35: Mirror.create,
    45: Mirror.rename2,
}


def _names(data: bytes) -> list[str]:
    return [name.decode() for name in data.split(b"\0") if name]


class _Served:
    """The mount, and the state of its failure."""

    def __init__(self, mirror: Mirror, device: int):
        self._mirror, self._device = mirror, device
        self._code, self._only_writes, self.silent = 0, False, False

    def order(self, words: list[str]) -> None:
        self.silent = words[0] == "silence"
        self._code = int(words[1]) if words[0].startswith("errno") else 0
        self._only_writes = words[0] == "errno-writes"

    def serve(self) -> bool:
        """Answer one request. Returns False if the mount is gone."""
        try:
            data = os.read(self._device, _MOST_WRITE + 4096)
        except InterruptedError:
            return True
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.EAGAIN)  # a request that its process took back
        _, opcode, unique, node, *_ = _IN.unpack_from(data)
        if opcode in _SILENT:
            return True
        code, answer = 0, b""
        try:
            fails = self._code and opcode != _DESTROY and (not self._only_writes or self._changes(opcode, data))
            if fails:
                raise OSError(self._code, "as ordered")
            answer = self._mirror.answer(opcode, node, data[_IN.size :])
        except OSError as error:
            code = error.errno or errno.EIO
        with_answer = _OUT.pack(_OUT.size + len(answer), -code, unique) + answer
        try:
            os.write(self._device, with_answer)
        except OSError as error:
            return error.errno == errno.ENOENT
        return opcode != _DESTROY

    def _changes(self, opcode: int, data: bytes) -> bool:
        """Return whether a request changes something: an OPEN does if it is for writing."""
        return opcode in _WRITES or (opcode == 14 and bool(data[_IN.size] & (os.O_WRONLY | os.O_RDWR)))


def mount(point: Path, device: int) -> None:
    """Mount what this process serves by /dev/fuse. Raises OSError."""
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read={_MOST_WRITE}"
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _MS_NOSUID | _MS_NODEV
    if libc.mount(b"ingot-board", os.fsencode(point), b"fuse", flags, options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(point))


def main() -> None:
    folder, point = map(Path, sys.argv[1:])
    device = os.open("/dev/fuse", os.O_RDWR)
    mirror = Mirror(folder)
    mount(point, device)
    served, orders = _Served(mirror, device), sys.stdin
    print("mounted", flush=True)
    poll = select.poll()
    while True:
        for fd in (device, orders.fileno()):
            poll.register(fd, select.POLLIN)
        if served.silent:
            poll.unregister(device)
        for fd, _ in poll.poll():
            if fd == device:
                if not served.serve():
                    return
            elif line := orders.readline():
                served.order(line.split())
                print("done", flush=True)
            else:
                return


if __name__ == "__main__":
    main()

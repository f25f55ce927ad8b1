"""Disks that are full, limited, read-only, or gone, each given to a real run that goes on from step 2."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.checkpoint.manifest import DamagedCheckpoint
from crosstune.checkpoint.read import open_checkpoint
from crosstune.files.atomic_files import leftovers
from injection.bench import NUM_STEPS, SAVE_STEPS, Bench
from injection.children import Child, Ended
from injection.kills import Trial

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE, _DETACH = 1, 32, 4096, 16384, 1 << 18, 2
PAGE = 4096
_LOG_BYTES = 8 * PAGE


def can_mount(home: Path) -> bool:
    """Return whether a child may have file systems of its own: as root, or where users may make namespaces."""
    return Child(partial(_try_mount, home), said=home).wait().code == 0


def fill_disk(bench: Bench, method: str, *, share: float, checked: bool) -> Trial:
    """A disk with room for a share of the next checkpoint. Without `checked` the room goes only after it was looked
    for, as when another program takes it: the write itself then fails half-way."""
    return _on_disk(
        bench,
        method,
        kind="disk full" if checked else "disk fills while writing",
        seed=round(share * 1000),
        before=lambda folder: _small_disk(bench, method, folder, share=share, checked=checked),
        may_finish=share > 0.9 and not checked,
    )


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Limit the size of every file, which ends a write as a full disk does and needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limit_file_size(bench: Bench, method: str, *, limit_bytes: int) -> Trial:
    """RLIMIT_FSIZE, which stops a write as a full disk does and needs no rights."""

    def before(folder: Path) -> None:
        shutil.copytree(bench.halfway(method), folder, symlinks=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))

    return _on_disk(bench, method, kind="file-size limit", seed=limit_bytes, before=before, may_finish=False)


def break_while_saving(bench: Bench, method: str, how: str, *, on_save_error: str = "stop") -> Trial:
    """Something happens to the folder at the moment when the checkpoint of step 4 is to be written."""

    def before(folder: Path) -> None:
        shutil.copytree(bench.halfway(method), folder, symlinks=True)
        _when_saving(partial(BREAKS[how], folder))

    goes_on = on_save_error == "continue" and how != "mount vanishes"
    return _on_disk(
        bench,
        method,
        kind=f"{how}, {on_save_error}",
        seed=0,
        before=before,
        may_finish=goes_on,
        gone=how == "mount vanishes",
        on_save_error=on_save_error,
    )


def _on_disk(
    bench: Bench,
    method: str,
    *,
    kind: str,
    seed: int,
    before: Callable[[Path], None],
    may_finish: bool,
    gone: bool = False,
    **options: Any,
) -> Trial:
    """The run and the look at what it left happen in one child, as the disk is only there for it."""
    folder = bench.home / "disk" / "run"
    verdict = bench.home / "verdict.txt"
    verdict.unlink(missing_ok=True)
    bench.halfway(method)
    words = bench.words(method, folder, resume="auto", **options)
    child = Child(partial(_run_and_look, words, before, folder, verdict, gone), said=bench.home)
    ended = child.wait()
    problems = verdict.read_text().splitlines() if verdict.exists() else ["nothing was looked at"]
    shutil.rmtree(bench.home / "disk", ignore_errors=True)
    problems += _judge(ended, may_finish=may_finish)
    return Trial(kind=kind, method=method, seed=seed, problems=problems, kills=0)


def _judge(ended: Ended, *, may_finish: bool) -> list[str]:
    problems = []
    if "Traceback" in ended.said:
        problems.append(f"a traceback: {ended}")
    if ended.code == 0:
        return [*problems, *([] if may_finish else [f"it finished: {ended}"])]
    if ended.code != 2:
        problems.append(f"it ended with {ended}")
    if "why:" not in ended.said or "do:" not in ended.said:
        problems.append(f"it does not say why and what to do: {ended}")
    return problems


def _run_and_look(words: list[str], before: Any, folder: Path, verdict: Path, gone: bool) -> int:
    from crosstune.cli.main import main

    _own_mounts()
    folder.parent.mkdir(parents=True, exist_ok=True)
    before(folder)
    code = main(words)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    problems = [] if gone else _look(folder, finished=code == 0)
    verdict.write_text("\n".join(problems))
    return code


def _look(folder: Path, *, finished: bool) -> list[str]:
    root = folder / "checkpoints"
    problems = []
    for _, path in checkpoint_folders(root):
        try:
            open_checkpoint(path)
        except DamagedCheckpoint as error:
            problems.append(f"torn: {error.why}")
    steps = [step for step, _ in checkpoint_folders(root)]
    if not finished and steps not in ([SAVE_STEPS], [NUM_STEPS]):
        problems.append(f"the old checkpoint is not there, but {steps}")
    return problems + [f"left behind: {path.name}" for path in leftovers(root, of=bool)]


def _small_disk(bench: Bench, method: str, folder: Path, *, share: float, checked: bool) -> None:
    import crosstune.checkpoint.write as write

    used = sum(_pages(p.stat().st_size) for p in bench.halfway(method).rglob("*") if p.is_file())
    (newest,) = checkpoint_folders(bench.halfway(method) / "checkpoints")
    need = sum(_pages(path.stat().st_size) for path in newest[1].iterdir())
    room = used + _LOG_BYTES + int(share * need)
    if not checked:
        write.check_room = lambda root, need: None  # type: ignore[assignment, misc]
    _mount("tmpfs", folder.parent, "tmpfs", 0, f"size={_pages(room)}")
    shutil.copytree(bench.halfway(method), folder, symlinks=True)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _when_saving(action: Callable[[], None]) -> None:
    import crosstune.loop.save as saving

    plain = saving.write_checkpoint

    def write_checkpoint(*args: Any) -> Any:
        action()
        return plain(*args)

    saving.write_checkpoint = write_checkpoint


def _become_read_only(folder: Path) -> None:
    root = folder / "checkpoints"
    _mount(str(root), root, None, _BIND, None)
    _mount(None, root, None, _REMOUNT | _BIND | _RDONLY, None)


def _lose_permission(folder: Path) -> None:
    """Root may write everywhere, so it becomes somebody who may not."""
    (folder / "checkpoints").chmod(0o500)
    if os.getuid() == 0:
        _drop_rights()


def _drop_rights() -> None:
    """Keep the user, but lose the capability to ignore permissions (CAP_DAC_OVERRIDE) in every thread to come."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    _check(_libc().capget(header, sets))
    for place in (0, 1, 2):
        sets[place] &= ~0b110
    _check(_libc().capset(header, sets))


def _vanish(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


BREAKS: dict[str, Callable[[Path], None]] = {
    "read-only": _become_read_only,
    "permission lost": _lose_permission,
    "mount vanishes": _vanish,
}


def _try_mount(home: Path) -> int:
    try:
        _own_mounts()
        place = home / "try-mount"
        place.mkdir(exist_ok=True)
        _mount("tmpfs", place, "tmpfs", 0, "size=64k")
    except OSError:
        return 1
    return 0


def _own_mounts() -> None:
    """File systems that are mounted from here on are seen by this process alone, and go with it."""
    if os.getuid() != 0:
        ids = f"{os.getuid()} {os.getuid()} 1", f"{os.getgid()} {os.getgid()} 1"
        _check(_libc().unshare(_NEW_MOUNTS | _NEW_USER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(ids[0])
        Path("/proc/self/gid_map").write_text(ids[1])
    else:
        _check(_libc().unshare(_NEW_MOUNTS))
    _mount(None, Path("/"), None, _REC | _PRIVATE, None)


def _mount(source: str | None, target: Path, kind: str | None, flags: int, data: str | None) -> None:
    words = [word.encode() if word is not None else None for word in (source, str(target), kind, data)]
    _check(_libc().mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

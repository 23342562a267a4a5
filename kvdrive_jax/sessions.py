"""``python -m kvdrive_jax.sessions``: saved sessions listed, verified and removed.

    list     one line per saved session of a directory
    verify   read every byte of saved sessions
    prune    remove what interrupted saves left, what is damaged, and on request saved sessions

A directory is a saved session or holds some. Answers go to stdout, the rest to stderr. Exit status:
0 done, 1 a saved session is broken or could not be removed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdrive_jax.config import format_size
from kvdrive_jax.telemetry import Progress

if TYPE_CHECKING:
    from kvdrive_jax.tiers.archive import Archive

DONE, FAILED, USAGE = 0, 1, 2

DAY_S = 86400.0
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class SavedSession:
    """What a list tells of one saved session; None for what its header does not say.

    Attributes:
        tokens: held, generated ones among them; context: the longest it may become, in tokens.
        digest: of the model.
        nbytes: on disk; created: in seconds since 1970; age_s: seconds since then.
        error: why it cannot be opened, None when it can.
    """

    path: str
    model: str | None = None
    digest: str | None = None
    tokens: int | None = None
    generated: int | None = None
    context: int | None = None
    dtype: str | None = None
    nbytes: int | None = None
    created: float | None = None
    age_s: float | None = None
    error: str | None = None

    @classmethod
    def of(cls, archive: Archive, now: float) -> SavedSession:
        """Of an archive, at ``now`` seconds since 1970."""
        kinds: dict[str, type] = {"model": str, "digest": str, "dtype": str}
        kinds |= {"tokens": int, "generated": int, "context": int}
        found: dict[str, Any] = {
            name: archive.header[name]
            for name, kind in kinds.items()
            if type(archive.header.get(name)) is kind
        }
        return cls(
            path=str(archive.path),
            nbytes=archive.nbytes,
            created=archive.created,
            age_s=max(0.0, now - archive.created),
            **found,
        )

    def line(self) -> str:
        """For people, under `TITLES`."""
        if self.error is not None:
            return f"{_shown(self.path)}\tbroken: {_shown(self.error)}"
        values = (
            self.path,
            self.model,
            self.digest and self.digest[:12],
            self.tokens,
            self.generated,
            self.context,
            self.dtype,
            None if self.nbytes is None else format_size(self.nbytes),
            None if self.age_s is None else format_age(self.age_s),
        )
        return "\t".join("-" if value is None else _shown(str(value)) for value in values)


TITLES = "path\tmodel\tdigest\ttokens\tgenerated\tcontext\tdtype\tsize\tage"


def format_age(seconds: float) -> str:
    """Seconds for people: ``5 s``, ``12 min``, ``3 h``, ``40 d``."""
    for unit, size in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{int(seconds / size)} {unit}"
    return f"{int(seconds)} s"


def list_sessions(options: argparse.Namespace) -> int:
    """One line per saved session; a broken one says why."""
    from kvdrive_jax.tiers.archive import find_archives, open_archive

    now = time.time()
    paths = find_archives(options.directory)
    if not paths:
        _say(f"no saved session in {_shown(options.directory)}")
    elif not options.json:
        print(TITLES)
    for path in paths:
        try:
            session = SavedSession.of(open_archive(path), now)
        except ValueError as error:
            session = SavedSession(path=str(path), error=str(error))
        print(json.dumps(asdict(session)) if options.json else session.line(), flush=True)
    return DONE


def verify(options: argparse.Namespace) -> int:
    """Read all there is; every saved session gets its line."""
    from kvdrive_jax.tiers.archive import ArchiveError, find_archives, open_archive

    paths: list[Path] = []
    for directory in options.directories:
        found = find_archives(directory)
        if not found:
            raise ValueError(f"directory {directory!r} has no saved session")
        paths += (path for path in found if path not in paths)
    status = DONE
    for number, path in enumerate(paths, start=1):
        try:
            archive = open_archive(path)
            label = f"{_shown(str(path))} ({number} of {len(paths)})"
            progress = Progress(label, archive.nbytes // MIB, "MiB", quiet=options.quiet)
            done = 0
            try:
                for _, nbytes in archive.verify():
                    done += nbytes
                    progress.update(done // MIB)
            finally:
                progress.finish(f"{label}: {format_size(done)} read")
        except (ValueError, ArchiveError) as error:
            status = FAILED
            print(SavedSession(path=str(path), error=str(error)).line(), flush=True)
        else:
            print(f"{_shown(str(path))}\twhole\t{format_size(archive.nbytes)}", flush=True)
    return status


def prune(options: argparse.Namespace) -> int:
    """Remove, or only tell, what is in nobody's use; what a live save writes stays."""
    from kvdrive_jax.tiers.archive import (
        ArchiveError,
        bytes_under,
        find_archives,
        orphans,
        prune_orphans,
        remove_archive,
    )

    status, freed = DONE, 0
    would = "would remove" if options.dry_run else "removed"
    chosen = [(path, _reason(path, options)) for path in find_archives(options.directory)]
    chosen = [(path, reason) for path, reason in chosen if reason]
    leftover = [
        (path, bytes_under(path))
        for path in orphans(options.directory)
        if path.parent not in {path for path, _ in chosen}
    ]
    for path, reason in chosen:
        try:
            nbytes = bytes_under(path) if options.dry_run else remove_archive(path)
        except (ValueError, ArchiveError) as error:
            status = FAILED
            _say(f"error: {_shown(str(error))}")
            continue
        freed += nbytes
        print(f"{would}\t{_shown(str(path))}\t{format_size(nbytes)}\t{reason}", flush=True)
    if options.dry_run:
        freed += sum(nbytes for _, nbytes in leftover)
    elif leftover:
        freed += prune_orphans(options.directory)
    for path, nbytes in leftover:
        if path.exists() and not options.dry_run:
            status = FAILED
            _say(f"error: {_shown(str(path))} cannot be removed")
            continue
        line = f"{would}\t{_shown(str(path))}\t{format_size(nbytes)}\tan interrupted save left it"
        print(line, flush=True)
    print(f"{'would free' if options.dry_run else 'freed'}\t{freed} bytes ({format_size(freed)})")
    return status


def _reason(path: Path, options: argparse.Namespace) -> str:
    """Why a saved session goes; empty when it stays."""
    from kvdrive_jax.tiers.archive import DamagedError, open_archive

    try:
        age_s = time.time() - open_archive(path).created
        if options.older_than is not None and age_s > options.older_than * DAY_S:
            return f"saved {format_age(age_s)} ago"
    except DamagedError as error:
        return _shown(str(error))
    except ValueError as error:
        # Another version, or a disk that does not answer now: nobody asked for that.
        if not options.all:
            _say(f"kept: {_shown(str(error))}")
    return "all were asked for" if options.all else ""


def _shown(text: str) -> str:
    """``text`` in one line and one column, without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _days(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be days, at least 0, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvdrive_jax.sessions",
        description="List, verify and remove saved sessions.",
        epilog="Exit status: 0 done, 1 a saved session is broken or could not be removed, "
        "2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    commands = parser.add_subparsers(dest="command", required=True)
    where = "a saved session, or a directory that has some"

    listing = commands.add_parser("list", help="one line per saved session", allow_abbrev=False)
    listing.set_defaults(run=list_sessions)
    listing.add_argument("directory", metavar="DIR", help=where)
    listing.add_argument("--json", action="store_true", help="one JSON object a line")

    verifying = commands.add_parser("verify", help="read every byte", allow_abbrev=False)
    verifying.set_defaults(run=verify)
    verifying.add_argument("directories", nargs="+", metavar="DIR", help=where)
    verifying.add_argument("--quiet", action="store_true", help="no progress on stderr")

    pruning = commands.add_parser(
        "prune",
        help="remove what interrupted saves left and what is damaged; asks nothing",
        allow_abbrev=False,
    )
    pruning.set_defaults(run=prune)
    pruning.add_argument("directory", metavar="DIR", help=where)
    pruning.add_argument(
        "--older-than",
        type=_days,
        metavar="DAYS",
        help="saved sessions of more than so many days too",
    )
    pruning.add_argument("--all", action="store_true", help="every saved session too")
    pruning.add_argument("--dry-run", action="store_true", help="only print what would go")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; SystemExit only from --help and usage errors."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        _say("error: stopped")
        return FAILED
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        refused = isinstance(error, ValueError)
        _say(f"error: {_shown(str(error)) if refused else f'{type(error).__name__}: {error}'}")
        return USAGE if refused else FAILED


if __name__ == "__main__":
    sys.exit(main())

"""`scanl pack FILE... -o ARCHIVE` and `scanl unpack ARCHIVE`: files by what a language model expects of them."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from scanl.cli.parser import Parser
from scanl.cli.text_model import text_model
from scanl.errors import ConfigError, DataError
from scanl.files import check_new_file, check_new_folder, locked, writing, written_whole
from scanl.learning.progress import PrintedProgress
from scanl.models.byte_models import byte_model_names
from scanl.options import Positive, PositiveOrNone
from scanl.packing import Archive, ArchiveMember, ContextsAlone, pack_pieces
from scanl.packing.packing import FRAME_SIZE, PIECE, STREAMS

STANDARD = "-"  # the standard input or output
MODEL = "a run on text, or the name of a model that comes with scanl"
NOTES = {
    "if it is interrupted": {
        "pack and unpack": "leave a file .NAME.partial, and go on from there when they are called again",
    }
}


def run(argv: Sequence[str]) -> int:
    """Pack files into an archive."""
    examples = {
        "scanl pack book.txt -o book.scanl": "with the model that comes with scanl",
        "cat *.log | scanl pack - --model runs/logs-1 -o -": "from a pipe to a pipe, with a model of your own",
    }
    about = "Make files small by what a language model expects of them."
    parser = Parser("pack", about, examples=examples, notes=NOTES)
    parser.add_argument("files", type=str, nargs="+", metavar="FILE", help="files to pack; -: the standard input")
    parser.add_argument("-o", "--out", type=str, metavar="ARCHIVE", help="file to write; -: the standard output")
    names = ", ".join(byte_model_names())
    parser.add("--model", str, f"{MODEL}: {names}", "text", metavar="RUN|NAME")
    parser.add_argument("--fast", action="store_true", help="without a model: more bits, a tenth of the time")
    parser.add_argument("--learn", action="store_true", help="learn from what was coded: fewer bits, more time")
    parser.add("--streams", Positive, "parts of a frame that are coded side by side", STREAMS)
    parser.add("--frame", Positive, "bytes that are coded, and can be read, by themselves", FRAME_SIZE)
    parser.add("--threads", PositiveOrNone, "of the processor; none: all; they change no bit")
    args = parser.parse(argv)
    if args.out is None:
        raise ConfigError("pack: out is missing, expected the archive to write; give -o ARCHIVE, or -o -")
    members = _named(args.files)
    if args.fast and (args.learn or args.model != "text"):
        raise ConfigError("pack: fast packs without a model; leave out --model and --learn")
    model = ContextsAlone() if args.fast else text_model("pack", args.model)
    total = None if STANDARD in args.files else sum(os.path.getsize(path) for path in args.files)
    if args.out != STANDARD:
        check_new_file("pack", "out", Path(args.out))
    began = time.monotonic()
    with _CodedProgress(total) as moved, _partial(args.out) as (file, earlier):
        parts = pack_pieces(
            _pieces(args.files, members), model, learn=args.learn, streams=args.streams, frame=args.frame,
            threads=args.threads, members=members, earlier=earlier, moved=moved,
        )  # fmt: skip
        packed = 0
        for part in parts:
            file.write(part)
            file.flush()
            packed += len(part)
    size = sum(member.size for member in members)
    bits = f", {8 * packed / size:.3f} bits a byte" if size else ""
    text = f"{args.out}: {size:,} bytes in {packed:,}{bits}, {time.monotonic() - began:.1f} s"
    print(text, file=sys.stderr if args.out == STANDARD else sys.stdout)
    return 0


def run_unpack(argv: Sequence[str]) -> int:
    """Write the files of an archive, or some of its bytes."""
    examples = {
        "scanl unpack book.scanl": "write book.txt into this folder",
        "scanl unpack book.scanl --bytes 1000:2000": "print these bytes alone",
    }
    parser = Parser("unpack", "Write the files of an archive of `scanl pack`.", examples=examples, notes=NOTES)
    parser.add_argument("archive", type=str, metavar="ARCHIVE", help="file to read; -: the standard input")
    parser.add_argument("-o", "--out", type=str, metavar="FOLDER", help="folder to write to; -: the standard output")
    parser.add("--model", str | None, f"{MODEL}; none: one that comes with scanl", metavar="RUN|NAME")
    parser.add("--bytes", str | None, "write these bytes alone to the standard output", metavar="BEGIN:END")
    parser.add_argument("--list", action="store_true", help="print the names and sizes of the files, and do no more")
    parser.add("--threads", PositiveOrNone, "of the processor; none: all")
    args = parser.parse(argv)
    model = None if args.model is None else text_model("pack", args.model)
    with _input_file(args.archive) as source:
        if args.list or args.bytes is not None:
            if args.archive == STANDARD:
                raise ConfigError("unpack: archive is -, expected a file: a pipe is read to its end")
            archive = Archive(source, model, threads=args.threads)
            if args.list:
                for member in archive.index.members:
                    print(f"{member.size:>14,}  {member.name or '(no name)'}")
            else:
                sys.stdout.buffer.write(archive.read(*_range(args.bytes, archive.index.size)))
            return 0
        with _CodedProgress() as moved:
            archive = Archive(source, model, threads=args.threads, moved=moved)
            if args.archive != STANDARD:
                moved.total = archive.index.size
            if args.out == STANDARD:
                for data in archive.pieces():
                    sys.stdout.buffer.write(data)
            else:
                _write_members(archive, args.archive, Path(args.out or "."), known=args.archive != STANDARD)
    return 0


def _write_members(archive: Archive, name: str, folder: Path, *, known: bool) -> None:
    """Unpack into a file beside the results, and divide it when it is whole."""
    stem = "unpacked" if name == STANDARD else Path(name).name
    check_new_folder("unpack", "out", folder)
    if known:
        _targets(archive, stem, folder)  # refuses before any work
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{stem}.partial"
    with writing(partial):
        with partial.open("ab"):
            pass
        with partial.open("rb") as earlier, partial.open("r+b") as file:
            for data in archive.pieces(earlier):
                file.write(data)
                file.flush()
            file.truncate()
        with partial.open("rb") as file:
            for target, size in _targets(archive, stem, folder):
                target.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(target) as temporary, temporary.open("wb") as out:
                    while size and (piece := file.read(min(size, PIECE))):
                        out.write(piece)
                        size -= len(piece)
                print(target)
        partial.unlink()


def _targets(archive: Archive, stem: str, folder: Path) -> list[tuple[Path, int]]:
    """Return the files to write with their sizes. Raises an error for one that is there, or outside of the folder."""
    targets = []
    for member in archive.index.members:
        unnamed = stem.removesuffix(".scanl") if stem.endswith(".scanl") else f"{stem}.out"
        name = PurePosixPath(member.name or unnamed)
        if name.is_absolute() or ".." in name.parts:
            raise DataError(f"unpack: a file of the archive is called {name}, which is outside of the folder")
        target = folder / name
        if target.exists():
            raise ConfigError(f"unpack: {target} exists; move it, or choose another --out")
        targets.append((target, member.size))
    return targets


def _named(files: Sequence[str]) -> list[ArchiveMember]:
    """Return the files by the names that they have in the archive. Their sizes are set when they have been read."""
    members = []
    for path in files:
        if path != STANDARD and not os.path.isfile(path):
            raise ConfigError(f"pack: {path} is not a file; name files, or - for the standard input")
        parts = [part for part in Path(path).parts if part != Path(path).anchor]
        name = "" if path == STANDARD else "/".join(parts if ".." not in parts else parts[-1:])
        if any(member.name == name for member in members):
            raise ConfigError(f"pack: two files are called {name or STANDARD} in the archive, expected one")
        members.append(ArchiveMember(name, 0))
    return members


def _pieces(files: Sequence[str], members: list[ArchiveMember]) -> Iterator[bytes]:
    """Yield the bytes of files, and set the sizes of the members."""
    for at, path in enumerate(files):
        size = 0
        with _input_file(path) as file:
            while piece := file.read(PIECE):
                size += len(piece)
                yield piece
        members[at] = members[at]._replace(size=size)


@contextmanager
def _input_file(path: str) -> Iterator[BinaryIO]:
    if path == STANDARD:
        yield sys.stdin.buffer
        return
    if not os.access(path, os.R_OK):
        raise DataError(f"pack: {path} cannot be read: permission denied")
    with open(path, "rb") as file:
        yield file


@contextmanager
def _partial(path: str) -> Iterator[tuple[BinaryIO, BinaryIO | None]]:
    """Yield the file to write, and what an earlier call has left of it: the same bytes are written over these."""
    if path == STANDARD:
        yield sys.stdout.buffer, None
        return
    out = Path(path)
    partial = out.with_name(f".{out.name}.partial")
    with locked(out.parent, f"{partial.name}.lock", f"pack: {out}"), writing(out):
        with partial.open("ab"):
            pass
        with partial.open("rb") as earlier, partial.open("r+b") as file:
            yield file, earlier
            file.truncate()
            os.fsync(file.fileno())
        os.replace(partial, out)


class _CodedProgress(PrintedProgress):
    """Takes how many bytes were coded, and prints their share of `total`, if that is known."""

    def __init__(self, total: int | None = None) -> None:
        super().__init__()
        self.total, self._done = total, 0

    def __call__(self, count: int) -> None:
        self._done += count
        if self.total:
            self.at(self._done / self.total, f"{self._done / 1e6:.1f} of {self.total / 1e6:.1f} MB")


def _range(text: str, size: int) -> tuple[int, int]:
    begin, colon, end = text.partition(":")
    try:
        numbers = int(begin or 0), int(end or size)
    except ValueError:
        colon, numbers = "", (0, 0)
    if not colon:
        raise ConfigError(f"unpack: bytes is {text}, expected BEGIN:END, such as 1000:2000")
    return numbers

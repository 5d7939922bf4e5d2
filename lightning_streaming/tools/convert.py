"""Convert files to a dataset of MDS shards.

SOURCE is a file, a folder, a quoted pattern like 'data/*.jsonl', or the URL of one file. The names of its files
determine its kind, or --from:

    jsonl         one JSON object a line: .jsonl, .ndjson, .json, also with .gz
    csv, tsv      with a header row: .csv, .tsv, also with .gz
    parquet       .parquet; needs pyarrow
    huggingface   a folder written by save_to_disk of Hugging Face datasets; needs pyarrow
    webdataset    .tar files of samples
    images        a folder of images, with a subfolder per class or without classes
    text          a text file, or a folder of them; each file is a document

With --format, SOURCE is a directory written by another library, or its URL. Samples are read as runs read them with
format=, shard after shard.

All files of a folder, in the order of their names, become one dataset. A row that cannot be written is an error that
names its file and line; nothing is skipped.

    lightning-streaming convert reviews.jsonl data/reviews --compression zstd
    lightning-streaming convert corpus.parquet s3://corpus/train --columns text:str --columns id:int
    lightning-streaming convert s3://bucket/tars data/pictures --format webdataset --columns jpg --columns json
    lightning-streaming convert texts/ data/tokens --tokenize --tokenizer tokenizer.json --block-length 2049 --eot 0

To continue after a stop or a kill, run the command again with --resume.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lightning_streaming.errors import ConfigError, EncodingError, StreamingError
from lightning_streaming.escaping import shell_word
from lightning_streaming.storage import Location, local_path, mask_url
from lightning_streaming.tools import commands
from lightning_streaming.tools.console import FINE, PROGRAM, counted, print_json, print_line, print_note
from lightning_streaming.tools.converting import conversion, tokens
from lightning_streaming.tools.converting.sources import KINDS, open_source
from lightning_streaming.tools.converting.sources.csv_and_json import Delimited
from lightning_streaming.tools.converting.sources.row_encoding import (
    Sample,
    SampleEncoder,
    choose_columns,
    parse_columns,
)
from lightning_streaming.tools.converting.sources.row_source import InputPart, RowSource
from lightning_streaming.tools.converting.sources.stored_shards import StoredShards
from lightning_streaming.tools.stored.stored_dataset import StoredDataset, add_up, find_dataset
from lightning_streaming.units import format_bytes, parse_bytes
from lightning_streaming.writing.destination import CONVERSION_PLAN
from lightning_streaming.writing.shards import parse_settings

_SMALLEST_PART = 1024
_ONLY_TO_TOKENIZE = ("tokenizer", "block_length", "dtype", "eot", "text_column")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help="what to convert")
    add("out", metavar="OUT", help="directory or URL of the dataset")
    add("--from", dest="kind", choices=list(KINDS), help="kind of SOURCE, if its names do not determine it")
    commands.add_format(parser, has_block_length=True)
    add(
        "--columns",
        metavar="NAME[:ENCODING]",
        action="append",
        default=[],
        help="a column to write, and its encoding, which by default follows from the data; may be given several "
        "times, and then other columns are left out. All columns by default",
    )
    add("--separator", metavar="X", help="between cells of CSV, for example ';'; a comma by default")
    add("--limit", metavar="N", type=commands.positive, help="stop after the first N rows; done by one process")
    add("--compression", metavar="NAME[:LEVEL]", help="for example zstd or zstd:19; none by default")
    add("--hashes", metavar="NAME,...", default="", help="hashes to record, for example sha1,xxh3_64")
    add("--size-limit", metavar="SIZE", default="64mb", help="most raw bytes of a shard; 64mb by default")
    commands.add_workers(
        parser, commands.usable_cpus(), "processes that convert parts; by default one for each processor"
    )
    add(
        "--part-size",
        metavar="SIZE",
        default="256mb",
        help="bytes of input per part, the unit of work of one process; 256mb by default. A source of several parts is "
        "written to folders of OUT, the same ones for any --workers",
    )
    add("--resume", action="store_true", help="continue a stopped conversion with the same source and options")
    _add_tokenizing(parser)
    commands.add_json(parser)
    commands.add_storage_options(parser, of="OUT")
    commands.add_storage_options(parser, "--source-options", of="SOURCE")


def _add_tokenizing(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("text to blocks of tokens")
    add = group.add_argument
    add(
        "--tokenize",
        action="store_true",
        help=f"write one column, {tokens.COLUMN}: documents packed end to end into full blocks. The "
        "rest at the end of each part is dropped, and its size reported",
    )
    add("--tokenizer", metavar="FILE.json", help=f"file of the tokenizers package, or {tokens.BYTES} for UTF-8")
    words = "tokens per block; without --tokenize, of the data of --format"
    add("--block-length", metavar="N", type=commands.positive, help=words)
    add("--dtype", choices=tokens.DTYPES, help="type of the tokens; by default the smallest that holds them")
    add("--eot", metavar="ID", help="token to put after each document: its number, or its name")
    add("--text-column", metavar="NAME", help="column of the documents; text by default")


def run(args: Namespace) -> int:
    """Convert, and say what was written."""
    out = find_dataset(args.out, args.storage_options)
    with _source_of(args) as location:
        _check_is_apart(location.path, args.out)
        source = _separated(_opened(args, location), args.separator)
        try:
            result = _tokenize(args, source, out) if args.tokenize else _convert(args, source, out, location)
        except EncodingError as error:
            raise error.with_message(_with_room_made(str(error), args, out)) from error
    result = {"out": mask_url(args.out), **add_up(out.read_index()), **result}
    (print_json if args.json else _print)(result)
    return FINE


@contextmanager
def _source_of(args: Namespace) -> Iterator[_SourceFile]:
    """Where the source is; data of another format is read from there, shard by shard."""
    if args.format is None:
        with _local_source(args.source, args.source_options) as location:
            yield location
        return
    if args.kind is not None:
        raise ConfigError(
            f"--from {args.kind} and --format {args.format} both say what SOURCE is",
            hint="give one of them",
            option="--format",
        )
    shown = mask_url(args.source)
    yield _SourceFile(args.source, shown)


def _opened(args: Namespace, location: _SourceFile) -> RowSource:
    if args.format is None:
        return open_source(location.path, args.kind)
    # To tokenize text, the block length is that of the tokens that are made.
    block_length = None if args.tokenize else args.block_length
    return StoredShards.open(find_dataset(args.source, args.source_options, args.format, block_length))


def _with_room_made(words: str, args: Namespace, out: StoredDataset) -> str:
    """A way out that is a command, with the removal of what was written before it, which has other columns."""
    command = f"run: {_command_without_columns(args.given)} "
    if out.directory is None:
        return words.replace(command, f"remove what is in {out.shown}, and {command}")
    if not (out.directory / CONVERSION_PLAN).is_file():  # nothing is there, or nothing of ours
        return words
    return words.replace(command, command.replace("run: ", f"run: rm -r {shell_word(args.out)} && "))


def _why_empty(args: Namespace) -> str:
    if not args.tokenize:
        return "SOURCE has no rows, so there is nothing to write"
    return (
        f"the text of no part fills a block of {args.block_length} tokens, so there is nothing to write; give more "
        "text, a shorter --block-length or a larger --part-size"
    )


def _separated(source: RowSource, separator: str | None) -> RowSource:
    """The source with the separator that was asked for; it is not guessed, but a wrong one is told."""
    if isinstance(source, Delimited):
        if separator is not None:
            return source.with_separator(separator)
        source.check_separator()
    elif separator is not None:
        raise ConfigError(
            f"--separator is for CSV, but SOURCE is read as {type(source).__name__}",
            hint="say --from csv",
            option="--separator",
        )
    return source


def _convert(args: Namespace, source: RowSource, out: StoredDataset, location: _SourceFile) -> dict[str, Any]:
    others = _ONLY_TO_TOKENIZE if args.format is None else set(_ONLY_TO_TOKENIZE) - {"block_length"}
    unused = [name for name in others if getattr(args, name) is not None]
    if unused:
        raise ConfigError(
            f"--{unused[0].replace('_', '-')} is for --tokenize",
            hint="add it, or leave this out",
            option=f"--{unused[0].replace('_', '-')}",
        )
    schema = source.schema()
    plan = choose_columns(schema, parse_columns(args.columns, schema.columns), _command_without_columns(args.given))
    shown = ", ".join(f"{name} {encoding}" for name, encoding in plan.encodings.items())
    print_note("convert", f"columns, from {location.shown_in(schema.told_by)}: {shown}")
    SampleEncoder(source, plan)  # raises where the source cannot have these encodings
    rows = conversion.RowConversion(source=source, plan=plan, limit=args.limit)
    _write(args, source, rows, out, plan.encodings, {"--tokenize": False})
    return {"columns": dict(plan.encodings)}


def _tokenize(args: Namespace, source: RowSource, out: StoredDataset) -> dict[str, Any]:
    settings = _packing(args, source)
    columns = {tokens.COLUMN: settings.encoding}
    print_note("convert", f"columns: {tokens.COLUMN} {settings.encoding}")
    with TemporaryDirectory(prefix="lightning_streaming_") as tallies:
        blocks = conversion.TextConversion(source=source, settings=settings, limit=args.limit, tallies=tallies)
        _write(args, source, blocks, out, columns, _described(settings))
        return {"columns": columns, **conversion.sum_tallies(tallies)}


def _packing(args: Namespace, source: RowSource) -> tokens.PackingSettings:
    """Check what was asked for against the tokenizer and the columns of the source."""
    missing = [name for name in ("tokenizer", "block_length") if getattr(args, name) is None]
    if missing:
        raise ConfigError(
            f"--tokenize needs --{missing[0].replace('_', '-')} too", option=f"--{missing[0].replace('_', '-')}"
        )
    if args.columns:
        raise ConfigError(
            "--tokenize writes the tokens alone",
            hint="leave --columns out, and name the text by --text-column",
            option="--columns",
        )
    text_column = args.text_column or "text"
    schema = source.schema()
    if text_column not in schema.columns:
        raise ConfigError(
            f"there is no column {text_column!r} to tokenize; the columns of {schema.told_by} are "
            f"{', '.join(schema.columns)}",
            hint="choose one by --text-column",
            option="--text-column",
        )
    tokenizer = tokens.load_tokenizer(args.tokenizer)
    end = None if args.eot is None else tokens.find_end(tokenizer, args.eot)
    dtype = tokens.choose_dtype(max(tokenizer.num_ids, 0 if end is None else end + 1), args.dtype)
    return tokens.PackingSettings(
        tokenizer=args.tokenizer, text_column=text_column, block_length=args.block_length, dtype=dtype, end=end
    )


def _described(settings: tokens.PackingSettings) -> dict[str, Any]:
    """What decides on blocks, by the names of the options."""
    return {
        "--tokenize": True,
        "--tokenizer": tokens.fingerprint(settings.tokenizer),
        "--block-length": settings.block_length,
        "--dtype": settings.dtype,
        "--eot": settings.end,
        "--text-column": settings.text_column,
    }


def _write(
    args: Namespace,
    source: RowSource,
    convert: Callable[[InputPart], Iterator[Sample]],
    out: StoredDataset,
    columns: Mapping[str, str],
    options: Mapping[str, Any],
) -> None:
    part_size = parse_bytes(args.part_size, "--part-size")
    if part_size < _SMALLEST_PART:
        raise ConfigError(
            f"--part-size must be at least {_SMALLEST_PART} bytes, but got {args.part_size!r}", option="--part-size"
        )
    hashes = sorted({name for name in args.hashes.split(",") if name})
    settings = parse_settings(args.compression, hashes, args.size_limit)
    conversion.Conversion(
        source=source,
        parts=conversion.cut_source(source, part_size, args.limit),
        convert=convert,
        out=out,
        columns=columns,
        settings=settings,
        options={"--limit": args.limit, "--part-size": part_size, **options},
        why_empty=_why_empty(args),
    ).write(workers=args.workers, resume=args.resume)


def _check_is_apart(source: str, out: str) -> None:
    """What is written must not be read as a part of the source."""
    directory = local_path(out)
    if directory is not None and Path(source).is_dir() and directory.resolve().is_relative_to(Path(source).resolve()):
        raise ConfigError(
            f"OUT must not be in SOURCE, but {out} is in {source}",
            hint="choose another place",
            option="OUT",
            path=out,
        )


def _print(result: Mapping[str, Any]) -> None:
    size = format_bytes(result["stored_bytes"])
    samples, shards = counted(result["samples"], "sample"), counted(result["shards"], "shard")
    print_line(f"{result['out']}: {samples} in {shards}, {size}")
    if "tokens" in result:
        print_line(
            f"{counted(result['tokens'], 'token')} of {counted(result['documents'], 'document')}; dropped "
            f"{result['dropped_tokens']:,}, which filled no block at the end of a part"
        )


_LEFT_OUT = {"--columns": True, "--resume": False}
"""Options, and whether a value follows."""
_SECRET = ("--storage-options", "--source-options")


def _command_without_columns(given: Sequence[str]) -> str:
    """The ``convert`` that was typed, to be begun anew with other columns."""
    return " ".join(map(shell_word, [PROGRAM, "convert", *_kept(given)]))


def _kept(given: Sequence[str]) -> Iterator[str]:
    words = iter(given)
    for word in words:
        option, equals, value = word.partition("=")
        if option in _LEFT_OUT:
            if _LEFT_OUT[option] and not equals:
                next(words, None)
        elif option in _SECRET:
            pair = value if equals else next(words, "")
            yield from (option, f"{pair.partition('=')[0]}=...")
        else:
            yield mask_url(word)


_DOWNLOAD_SECONDS = 24 * 3600.0
"""For one attempt at a source that is a URL; it may be any size."""


class _SourceFile(NamedTuple):
    """Where a source is."""

    path: str
    """On this machine."""
    name: str
    """What it is called to people."""

    def shown_in(self, words: str) -> str:
        """Words that name the source as people know it."""
        return words.replace(self.path, self.name)


@contextmanager
def _local_source(location: str, options: Mapping[str, Any]) -> Iterator[_SourceFile]:
    """The source on this machine; of a URL a copy, which is removed again, and which no error names.

    Args:
        location: Path, pattern, or the URL of one file.
        options: Arguments of the filesystem of the URL.

    Raises:
        ConfigError: The URL names no file.
        StorageError: It could not be fetched.
    """
    here = local_path(location)
    if here is not None:
        yield _SourceFile(str(here), str(here))
        return
    name = PurePosixPath(urlsplit(location).path).name
    if not name:
        raise ConfigError(
            f"a SOURCE that is a URL must be one file, but got {mask_url(location)}",
            option="SOURCE",
            path=mask_url(location),
        )
    with TemporaryDirectory(prefix="lightning_streaming_") as folder:
        copy = _SourceFile(str(Path(folder, "source", name)), mask_url(location))
        Path(copy.path).parent.mkdir()
        Location(location, options, timeout=_DOWNLOAD_SECONDS).download(Path(copy.path))
        try:
            yield copy
        except StreamingError as error:
            shown = error.with_message(copy.shown_in(str(error)))
            shown.path = None if error.path is None else copy.shown_in(error.path)
            raise shown from error

"""Convert files to a dataset of MDS shards.

SOURCE is a file, a folder, a quoted pattern like 'data/*.jsonl', or the URL of one file. Its kind follows from the file
names, or from --from:

    jsonl         one JSON object per line: .jsonl, .ndjson, .json, also with .gz
    csv, tsv      with a header row: .csv, .tsv, also with .gz
    parquet       .parquet; needs pyarrow
    huggingface   a folder written by save_to_disk of Hugging Face datasets; needs pyarrow
    webdataset    .tar files of samples
    images        a folder of images, with a subfolder per class or without classes
    text          a text file, or a folder of them; each file is a document

With --format, SOURCE is a directory that another library wrote, or its URL. Samples are read in order, like those of a
run with format=.

All files of a folder, in the order of their names, become one dataset. If a row cannot be written, an error names its
file and line; nothing is skipped.

    lightning-streaming convert reviews.jsonl data/reviews --compression zstd
    lightning-streaming convert corpus.parquet s3://corpus/train --columns text:str --columns id:int
    lightning-streaming convert s3://bucket/tars data/pictures --format webdataset --columns jpg --columns json
    lightning-streaming convert chats.jsonl data/chats --chat --tokenizer folder-of-a-chat-model
    lightning-streaming convert texts/ data/tokens --tokenize --tokenizer tokenizer.json --documents --eot 0

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
from lightning_streaming.tokenizing import documents
from lightning_streaming.tokenizing import tokenizer as tokenizers
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

_MIN_PART_BYTES = 1024
_DOWNLOAD_SECONDS = 24 * 3600.0
"""Timeout of an attempt to download a source, which may be of any size."""
_OF_BOTH = ("tokenizer", "dtype")
_OF_TEXT = ("documents", "block_length", "bos", "eot", "text_column")
_OF_CHAT = ("template", "chat_column", "tools_column")
_TOOLS_COLUMN = "tools"
_CHAT_COLUMNS = ("messages", "conversations")
"""Names of the column of conversations, if --chat-column does not name it."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the tool."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help="what to convert")
    add("out", metavar="OUT", help="directory or URL of the dataset")
    add("--from", dest="kind", choices=list(KINDS), help="kind of SOURCE, if the file names do not determine it")
    commands.add_format(parser, has_block_length=True)
    add(
        "--columns",
        metavar="NAME[:ENCODING]",
        action="append",
        default=[],
        help="column to write, and its encoding, by default derived from the data; may be given several times. Without "
        "it, all columns are written",
    )
    add("--separator", metavar="X", help="separator of CSV cells, for example ';'; a comma by default")
    add("--limit", metavar="N", type=commands.positive, help="convert only the first N rows, in one process")
    add("--compression", metavar="NAME[:LEVEL]", help="compression, for example zstd or zstd:19; none by default")
    add("--hashes", metavar="NAME,...", default="", help="hashes to record, for example sha1,xxh3_64")
    add("--size-limit", metavar="SIZE", default="64mb", help="maximum raw bytes of a shard; 64mb by default")
    commands.add_workers(
        parser, commands.usable_cpus(), "processes that convert parts; by default one for each processor"
    )
    add(
        "--part-size",
        metavar="SIZE",
        default="256mb",
        help="bytes of input per part, the unit of work of one process; 256mb by default. If there are several parts, "
        "each is written to a folder of OUT; --workers does not change them",
    )
    add("--resume", action="store_true", help="continue a stopped conversion with the same source and options")
    add_to_group = parser.add_argument_group("text to tokens").add_argument
    add_to_group(
        "--tokenize",
        action="store_true",
        help=f"write one column, {documents.TOKENS}: with --documents, one document per sample; with --block-length, "
        "documents packed end to end into full blocks",
    )
    add_to_group(
        "--tokenizer",
        metavar="FILE.json",
        help=f"file of the tokenizers package, a folder with {tokenizers.TOKENIZER_FILE}, or {tokenizers.BYTES} for "
        "bytes of UTF-8",
    )
    add_to_group("--documents", action="store_const", const=True, help="one document per sample, of any length")
    words = "tokens per block; the rest at the end of each part is dropped, and its size reported. Without --tokenize, "
    words += "tokens per sample of --format"
    add_to_group("--block-length", metavar="N", type=commands.positive, help=words)
    add_to_group(
        "--dtype", choices=tokenizers.DTYPES, help="type of the tokens; by default the smallest that holds them"
    )
    add_to_group("--bos", metavar="ID", help="token to put before each document that does not begin with it")
    words = "token to put after each document that does not end with it: its number, or its name"
    add_to_group("--eot", metavar="ID", help=words)
    add_to_group("--text-column", metavar="NAME", help="column of the documents; text by default")
    add_to_group = parser.add_argument_group("conversations to tokens, with --tokenizer and --dtype").add_argument
    add_to_group(
        "--chat",
        action="store_true",
        help=f"write two columns: {documents.TOKENS} of each conversation, and {documents.LOSS_MASK}, 1 for those that "
        "the assistant writes. The template is that of the tokenizer's folder",
    )
    add_to_group("--template", metavar="FILE.jinja", help="another chat template")
    words = f"column of messages; by default {' or '.join(_CHAT_COLUMNS)}"
    add_to_group("--chat-column", metavar="NAME", help=words)
    add_to_group(
        "--tools-column",
        metavar="NAME",
        help=f"column of the tools of a conversation; by default {_TOOLS_COLUMN}, if the first row has it",
    )
    commands.add_json(parser)
    commands.add_storage_options(parser, of="OUT")
    commands.add_storage_options(parser, "--source-options", of="SOURCE")


def run(args: Namespace) -> int:
    """Convert, and print what was written."""
    out = find_dataset(args.out, args.storage_options)
    with _source_file(args) as location:
        directory, source_path = local_path(args.out), Path(location.path)
        if directory is not None and source_path.is_dir() and directory.resolve().is_relative_to(source_path.resolve()):
            raise ConfigError(
                f"OUT must not be in SOURCE, but {args.out} is in {location.path}",
                hint="choose another location",
                option="OUT",
                path=args.out,
            )
        source = _open(args, location)
        try:
            is_tokenized = args.tokenize or args.chat
            result = _tokenize(args, source, out) if is_tokenized else _convert(args, source, out, location)
        except EncodingError as error:
            # The suggested command must first remove what was written, which has other columns.
            command = again = f"run: {_command_without_columns(args.given)} "
            if out.directory is None:
                again = f"remove the files in {out.shown}, and {command}"
            elif (out.directory / CONVERSION_PLAN).is_file():  # else nothing was written, or not by us
                again = command.replace("run: ", f"run: rm -r {shell_word(args.out)} && ")
            raise error.with_message(str(error).replace(command, again)) from error
    result = {"out": mask_url(args.out), **add_up(out.read_index()), **result}
    if args.json:
        print_json(result)
        return FINE
    samples, shards = counted(result["samples"], "sample"), counted(result["shards"], "shard")
    print_line(f"{result['out']}: {samples} in {shards}, {format_bytes(result['stored_bytes'])}")
    if "tokens" in result:
        words = f"{counted(result['tokens'], 'token')} of {counted(result['documents'], 'document')}"
        if "dropped_tokens" in result:
            words += f"; dropped {result['dropped_tokens']:,}, which filled no block at the end of a part"
        if result.get("empty_documents"):
            words += f"; left out {counted(result['empty_documents'], 'document')} without tokens"
        if "trained_tokens" in result:
            words += f"; the loss counts {result['trained_tokens']:,}"
        print_line(words)
    return FINE


class _SourceFile(NamedTuple):
    """Location of a source."""

    path: str
    """Path on this machine."""
    name: str
    """Name in messages."""

    def shown_in(self, words: str) -> str:
        """Return a message with the name instead of the path."""
        return words.replace(self.path, self.name)


@contextmanager
def _source_file(args: Namespace) -> Iterator[_SourceFile]:
    """Yield the source on this machine; a URL of one file is downloaded to a temporary copy, which no error names.

    Data of another format is read from its location, shard by shard.

    Raises:
        ConfigError: The URL is not that of a file, or ``--from`` and ``--format`` are given.
        StorageError: It could not be downloaded.
    """
    location: str = args.source
    if args.format is not None:
        if args.kind is not None:
            both = f"--from {args.kind} and --format {args.format}"
            raise ConfigError(f"{both} both define the kind of SOURCE", hint="pass one of them", option="--format")
        yield _SourceFile(location, mask_url(location))
        return
    local = local_path(location)
    if local is not None:
        yield _SourceFile(str(local), str(local))
        return
    name, shown = PurePosixPath(urlsplit(location).path).name, mask_url(location)
    if not name:
        raise ConfigError(f"a SOURCE that is a URL must be one file, but got {shown}", option="SOURCE", path=shown)
    with TemporaryDirectory(prefix="lightning_streaming_") as folder:
        copy = _SourceFile(str(Path(folder, "source", name)), shown)
        Path(copy.path).parent.mkdir()
        Location(location, args.source_options, timeout=_DOWNLOAD_SECONDS).download(Path(copy.path))
        try:
            yield copy
        except StreamingError as error:
            renamed = error.with_message(copy.shown_in(str(error)))
            renamed.path = None if error.path is None else copy.shown_in(error.path)
            raise renamed from error


def _open(args: Namespace, location: _SourceFile) -> RowSource:
    """Open the source, with the requested separator; the separator is not guessed, but a wrong one is an error."""
    if args.format is not None:
        # To tokenize text, the block length is that of the new blocks.
        block_length = None if args.tokenize else args.block_length
        source: RowSource = StoredShards.open(find_dataset(args.source, args.source_options, args.format, block_length))
    else:
        source = open_source(location.path, args.kind)
    if isinstance(source, Delimited):
        if args.separator is not None:
            return source.with_separator(args.separator)
        source.check_separator()
    elif args.separator is not None:
        raise ConfigError(
            f"--separator is for CSV, but SOURCE is read as {type(source).__name__}",
            hint="pass --from csv",
            option="--separator",
        )
    return source


def _convert(args: Namespace, source: RowSource, out: StoredDataset, location: _SourceFile) -> dict[str, Any]:
    _refuse(args, _OF_CHAT, "--chat")
    _refuse(args, [name for name in (*_OF_BOTH, *_OF_TEXT) if args.format is None or name != "block_length"])
    schema = source.schema()
    plan = choose_columns(schema, parse_columns(args.columns, schema.columns), _command_without_columns(args.given))
    shown = ", ".join(f"{name} {encoding}" for name, encoding in plan.encodings.items())
    print_note("convert", f"columns, from {location.shown_in(schema.origin)}: {shown}")
    SampleEncoder(source, plan)  # raises if the source cannot have these encodings
    rows = conversion.RowConversion(source=source, plan=plan, limit=args.limit)
    _write(args, source, rows, out, plan.encodings, {"--tokenize": False})
    return {"columns": dict(plan.encodings)}


def _refuse(args: Namespace, names: Sequence[str], needed: str = "--tokenize") -> None:
    unused = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if unused:
        raise ConfigError(f"{unused[0]} is for {needed}", hint="add it, or omit this option", option=unused[0])


def _tokenize(args: Namespace, source: RowSource, out: StoredDataset) -> dict[str, Any]:
    settings = _token_settings(args, source)
    columns = settings.columns
    print_note("convert", "columns: " + ", ".join(f"{name} {encoding}" for name, encoding in columns.items()))
    tokenizer = settings.documents
    options = {
        "--tokenize": args.tokenize,
        "--chat": args.chat,
        "--tokenizer": tokenizer.fingerprint,
        "--block-length": settings.block_length,
        "--dtype": settings.dtype,
        "--bos": tokenizer.ends[0],
        "--eot": tokenizer.ends[1],
        "--text-column": tokenizer.text,
        "--chat-column": tokenizer.chat,
        "--tools-column": tokenizer.tools,
        "the chat template": tokenizer.digest if args.chat else None,
    }
    with TemporaryDirectory(prefix="lightning_streaming_") as tallies:
        blocks = conversion.TextConversion(source=source, settings=settings, limit=args.limit, tallies=tallies)
        _write(args, source, blocks, out, columns, options)
        return {"columns": columns, **conversion.sum_tallies(tallies)}


def _token_settings(args: Namespace, source: RowSource) -> tokens.TokenSettings:
    """Return the options of tokens, checked against the tokenizer and the columns of the source."""
    option = "--chat" if args.chat else "--tokenize"
    if args.chat and args.tokenize:
        raise ConfigError("--chat and --tokenize are for different columns", hint="pass one of them", option="--chat")
    if args.tokenizer is None:
        raise ConfigError(f"{option} needs --tokenizer too", option="--tokenizer")
    _refuse(args, *((_OF_TEXT, "--tokenize") if args.chat else (_OF_CHAT, "--chat")))
    if args.tokenize and bool(args.documents) == (args.block_length is not None):
        raise ConfigError(
            "--tokenize needs either --documents, for packing, or --block-length, for blocks of one length",
            option="--documents",
        )
    if args.columns:
        hint = f"omit --columns, and name the column by {'--chat-column' if args.chat else '--text-column'}"
        raise ConfigError(f"{option} writes the tokens alone", hint=hint, option="--columns")
    schema = source.schema()
    if args.chat:
        known = [name for name in _CHAT_COLUMNS if name in schema.columns]
        column = args.chat_column or (known[0] if known else _CHAT_COLUMNS[0])
        tools = args.tools_column or (_TOOLS_COLUMN if _TOOLS_COLUMN in schema.columns else None)
        tokenizer = documents.DocumentTokenizer(
            tokenizer=args.tokenizer, chat=column, tools=tools, template=args.template
        )
    else:
        tokenizer = documents.DocumentTokenizer(
            tokenizer=args.tokenizer, text=args.text_column or "text", bos=args.bos, eos=args.eot
        )
    for column in tokenizer.columns:
        if column not in schema.columns and column != tokenizer.tools:  # later rows may have tools
            raise ConfigError(
                f"there is no column {column!r} to tokenize; the columns of {schema.origin} are "
                f"{', '.join(schema.columns)}",
                hint=f"choose one by {'--chat-column' if args.chat else '--text-column'}",
                option="--chat-column" if args.chat else "--text-column",
            )
    tokenizer.check()
    return tokens.TokenSettings(
        documents=tokenizer,
        block_length=args.block_length,
        dtype=tokenizers.choose_dtype(tokenizer.num_ids, args.dtype),
    )


def _write(
    args: Namespace,
    source: RowSource,
    convert: Callable[[InputPart], Iterator[Sample]],
    out: StoredDataset,
    columns: Mapping[str, str],
    options: Mapping[str, Any],
) -> None:
    part_size = parse_bytes(args.part_size, "--part-size")
    if part_size < _MIN_PART_BYTES:
        raise ConfigError(
            f"--part-size must be at least {_MIN_PART_BYTES} bytes, but got {args.part_size!r}", option="--part-size"
        )
    hashes = sorted({name for name in args.hashes.split(",") if name})
    why_empty = "SOURCE has no rows, so there is nothing to write"
    if args.block_length is not None and args.tokenize:
        why_empty = (
            f"the text of no part fills a block of {args.block_length} tokens, so there is nothing to write; provide "
            "more text, a shorter --block-length or a larger --part-size"
        )
    conversion.Conversion(
        source=source,
        parts=conversion.split_source(source, part_size, args.limit),
        convert=convert,
        out=out,
        columns=columns,
        settings=parse_settings(args.compression, hashes, args.size_limit),
        options={"--limit": args.limit, "--part-size": part_size, **options},
        why_empty=why_empty,
    ).write(workers=args.workers, resume=args.resume)


def _command_without_columns(typed: Sequence[str]) -> str:
    """Return the typed ``convert`` command, to run it again with other columns; without secrets."""
    kept = []
    words = iter(typed)
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--columns" and not equals:
            next(words, None)
        elif option in ("--storage-options", "--source-options"):
            pair = value if equals else next(words, "")
            kept += [option, f"{pair.partition('=')[0]}=..."]
        elif option not in ("--columns", "--resume"):
            kept.append(mask_url(word))
    return " ".join(map(shell_word, [PROGRAM, "convert", *kept]))

"""The options of the commands, how help texts look, and the fields of a configuration's records in words.

The parser refuses input in one line. A field of a record becomes an option with the docstring below the field as its
text, and with its type, its choices and its default. A clause ``None: ...`` in the docstring names the effect of
leaving the field out where the default is None. Nothing here imports JAX.
"""

import ast
import difflib
import inspect
import os
import re
import shutil
import sys
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin

from rrfp_jax.readable import sentence

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_MANY = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}
_PLACES = {int: "N", float: "X", bool: "true|false", str: "TEXT"}
_NARROW = 24
_NARROWEST, _WIDEST = 80, 120
INSTEAD = {
    "plan.objective": "rrfp plan makes the mean step small, and tells the 95th percentile beside it",
    "profile.microbatch_sizes": "give --microbatch-size, the same word as in rrfp plan",
    "plan.draws": "rrfp plan takes as many draws of the noise as suffice for the size of the pipeline",
    "plan.effort": "name --schedules for a quicker plan",
    "plan.picture": "rrfp plan --json --top N tells step time and memory of as many choices",
    "plan.seed": "the draws of the noise are the same in every plan, so leave it out",
    "plan.window": "rrfp plan gives each hint the largest window for which --memory suffices",
    "plan.data": "give --replicas",
    "pipeline.data": "give replicas",
    "pipeline.tensor": "give mesh, such as {tensor: 2}",
    "pipeline.context_attention": "it is chosen by the sizes, so leave it out",
    "pipeline.shard_optimizer": "give optimizer.shard",
    "pipeline.layers_per_chunk": "give layout, such as Et*3|t*3|t*2L, or auto",
    "pipeline.costs": "give them to rrfp plan, and layout the cut that it prints",
    "pipeline.embedding_chunk": "give layout, with E in that chunk",
    "pipeline.head_chunk": "give layout, with L in that chunk",
    "pipeline.encoder_layers_per_chunk": "give layout, with v for layers of the encoder, such as Pv*9|v*9p|Et*8|t*8L",
    "pipeline.encoder_stages": "give layout, with a chunk of the encoder for each of its stages, such as Pv|vp|Et|tL",
    "pipeline.projector_in": "give layout, with p in that chunk",
    "pipeline.stage_of_chunk": "give layout, with the stage of each chunk behind @, such as Pvp@0|Et@0|tL@1",
    "pipeline.freeze": "give optimizer.freeze",
    "pipeline.schedule_hash": "rrfp plan writes the hash into the CSV file, so leave it out",
    "pipeline.group_size": "give it in schedule, such as gis:2",
    "pipeline.footprint": "give consume foresight or ready, which both hold no more than schedule or window",
    "pipeline.foresight": "give consume foresight, or ready for none",
    "pipeline.read_ahead": "it follows from window, so leave it out",
    "pipeline.adaptive": "plan from a finished run's durations, with rrfp profile --timeline RUN and rrfp plan --costs",
    "pipeline.clip_norm": "give optimizer.clip_norm",
    "pipeline.skip_nonfinite": "such steps are always skipped, so leave it out",
    "pipeline.max_skipped_in_row": "give run.max_skipped_in_row",
    "pipeline.deterministic": "give run.deterministic",
    "pipeline.dispatch_ahead": "it is an argument of RuntimeOptions, so leave it out",
    "pipeline.group_protocol": "it is an argument of RuntimeOptions, so leave it out",
    "pipeline.progress_deadline_s": "give cluster.progress_deadline_s",
    "pipeline.transport": "give cluster.transport",
    **{
        f"optimizer.{name}": f"give optimizer.arguments, such as {{{name}: {value}}}"
        for name, value in {
            **{"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.95, "nesterov": "true"},
            **{"newton_schulz_steps": 5, "consistent_rms": 0.2, "adam_parameters": "[embedding.table]"},
            **{"decay_rate": 0.8, "clipping_threshold": 1.0, "multiply_by_parameter_scale": "true"},
            "min_dim_size_to_factor": 128,
        }.items()
    },
    **{
        name: f"give data with kind {kind}"
        for name, kind in {
            **{"image_text": "image_text", "tokens": "tokens", "jsonl": "jsonl", "parquet": "parquet"},
            "own_data": "own",
        }.items()
    },
    **dict.fromkeys(("vision.num_patches", "vision.max_rows", "vision.max_columns"), "give vision.grid, 256 or 2,16"),
    **{
        f"vision.{name}": f"give it in vision.overrides, such as {{{name}: ...}}"
        for name in (
            *("activation", "norm", "norm_eps", "qkv_bias", "qk_norm", "layer_scale", "final_norm", "feature_layer"),
            *("init_std", "param_dtype", "compute_dtype", "patch_bias", "class_token", "pre_norm"),
        )
    },
    **{
        f"projector.{name}": f"give it in projector.overrides, such as {{{name}: ...}}"
        for name in ("activation", "patches_per_feature", "row_order", "norm", "norm_eps", "mlp_dim", "bias")
    },
    **{
        f"data.{name}": f"give it in data.images, such as {{{name}: ...}}"
        for name in (
            *("image_folder", "image_size", "patch_size", "merge", "channels", "row_order", "max_patches"),
            *("max_pixels", "mean", "std", "image_length", "text_buckets", "image_buckets", "balance", "gather_text"),
        )
    },
    "data.wait_minutes": "processes wait for four hours, so leave it out",
    "run.profile_ranks": "rank 0 writes the trace, so leave it out",
    "run.timeline_steps": "the timeline shows the last step, so leave it out",
    "run.compile_cache": "set the environment variable RRFP_COMPILE_CACHE to the folder, or to none",
    "run.compile_cache_size": "4 GiB are kept, so leave it out",
    "tracking": "give the settings in run.trackers, such as [{wandb: {project: mine, mode: offline}}]",
    "cluster.array_connections": "two connections carry the arrays between two processes, so leave it out",
    "cluster.detect": "set the environment variable RRFP_DETECT=1",
}
"""The successors of options and keys that are gone: by ``section.key``, or by the name of a section."""
AS_MAPPING = ("vision", "projector", "adapters")
"""Sections with one option for all of their keys, since runs seldom differ from their files in these."""


class CommandParser(ArgumentParser):
    """The parser of a command. It refuses bad options in one line, with exit code 2.

    ``doc`` is the docstring of the command's module: its first line describes the command, and the block of
    commands behind ``::`` becomes the examples, after ``closing``.
    """

    def __init__(self, name: str, doc: str | None, *, closing: str = "", **options: Any) -> None:
        in_checkout = Path(sys.argv[0]).parent.name == "experiments"
        doc = doc or ""  # python -OO removes docstrings
        examples = examples_in(doc)
        ending = [closing, "examples:\n" + re.sub("^", "  ", examples, flags=re.MULTILINE) if examples else ""]
        super().__init__(
            prog=f"python -m experiments.{name.replace('-', '_')}" if in_checkout else f"rrfp {name}",
            description=doc.split("\n", maxsplit=1)[0].replace("``", ""),
            epilog="\n\n".join(filter(None, ending)) or None,
            formatter_class=HelpText,
            allow_abbrev=False,  # an abbreviation would mean something else once another option is added
            **options,
        )
        self._negative_number_matcher = re.compile(r"-\.?\d")  # `-1,2,3` is a value too

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._not_known(unknown[0]))
        for action in filter(takes_file, self._actions):  # no shell expands ~ in quotes or after =
            match getattr(arguments, action.dest, None):
                case str(path):
                    setattr(arguments, action.dest, os.path.expanduser(path))
                case [*paths]:
                    setattr(arguments, action.dest, [*map(os.path.expanduser, paths)])
        return arguments

    def error(self, message: str) -> NoReturn:
        print(f"error: {sentence(message)}", file=sys.stderr)
        sys.exit(2)

    def format_help(self) -> str:
        given = self.usage
        flags = [
            f"{each.option_strings[0]} {each.metavar}"
            for each in self._actions
            if each.required and each.option_strings
        ]
        places = [
            f"{each.metavar or each.dest}{' ...' if each.nargs in ('*', '+') else ''}"
            for each in self._actions
            if not each.option_strings
        ]
        usage = given or " ".join(["%(prog)s", *flags, "[option ...]", *places])
        lines = wrap(usage % {"prog": self.prog}, width() - len("usage: "))
        self.usage = "\n       ".join(lines).replace("%", "%%")
        try:
            return super().format_help()
        finally:
            self.usage = given

    def _not_known(self, word: str) -> str:
        flag = word.partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        section = name.partition(".")[0]
        by_key = {gone.rpartition(".")[2]: instead for gone, instead in reversed(INSTEAD.items())}
        if instead := INSTEAD.get(name) or INSTEAD.get(section) or by_key.get(name):
            return f"{flag!r} is no option: {instead}"
        flags = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
        advice = f"did you mean {near[0]}" if near else f"{self.prog} --help lists all options"
        return f"{word!r} is no option: {advice}"


def add_record_options(
    parser: ArgumentParser,
    sections: Mapping[str, type],
    choices: Mapping[str, Sequence[str]],
    qualified: Collection[str] = (),
) -> None:
    """Add an option for every field of every section, ``--field`` where its name is unique and ``--section.field``.

    A section of :data:`AS_MAPPING` has one option, ``--section``, which stands under the name ``section.``.

    ``choices`` names the values of some fields, by ``section.field``; ``qualified`` sections, and fields of others,
    whose options always name the section, so that they take no short name from others.
    """
    for section, record in sections.items():
        group = parser.add_argument_group(section, f"{field_texts(record)['']}.".replace("%", "%%"))
        if section in AS_MAPPING:
            keys = ", ".join(field.name for field in fields(record))
            text = f"The keys of the section that differ from the file, of {keys} (default: none)"
            group.add_argument(f"--{section}", dest=f"{section}.", metavar="MAPPING", default=SUPPRESS, help=text)
            continue
        for field in fields(record):
            name = f"{section}.{field.name}"
            flag, whole = flag_of(sections, name, qualified), whole_flag(name)
            words = field_words(record, field.name, choices.get(name, ()))
            listed = f"one of {', '.join(words.choices)}; " if words.place == "NAME" else ""
            text = f"{words.short} ({listed}{words.left_out})".replace("%", "%%")
            offer(group.add_argument(flag, dest=name, metavar=words.place, default=SUPPRESS, help=text), words.choices)
            if flag != whole:
                group.add_argument(whole, dest=name, default=SUPPRESS, help=SUPPRESS)


def offer(action: Action, values: Iterable[str]) -> None:
    """Name values of an option that a shell may complete, where others are possible or are refused elsewhere."""
    action.values = tuple(values)  # type: ignore[attr-defined]


def values_of(action: Action) -> tuple[str, ...]:
    """Returns the values of an option that are known by name: those on offer, or the words of ``on|off``."""
    offered: tuple[str, ...] = getattr(action, "values", ())
    words = str(action.metavar or "").split("|")
    return tuple(value for value in offered or words if re.fullmatch(r"[a-z0-9][\w./+-]*", value))


def takes_file(action: Action) -> bool:
    """Returns whether files are values of an option, by the placeholder of its value."""
    places = " ".join([str(action.metavar), *getattr(action, "values", ())])
    return bool(re.search(r"FILE|PATH|RUN|LOG|DIR|OUT|FOLDER|\.npy", places))


def given_texts(arguments: Namespace) -> dict[str, str]:
    """Returns the texts of the options that :func:`add_record_options` has added, by ``section.field``, where given."""
    return {name: text for name, text in vars(arguments).items() if "." in name}


def whole_flag(name: str) -> str:
    """Returns the option of a field that names its section too, or that of the whole section."""
    section = name.partition(".")[0]
    return f"--{section if section in AS_MAPPING else name.replace('_', '-')}"


def flag_of(sections: Mapping[str, type], name: str, qualified: Collection[str] = ()) -> str:
    """Returns the shortest option of a field ``section.field``."""
    key = name.partition(".")[2]
    owners = [other for other, record in sections.items() if any(key == field.name for field in fields(record))]
    short = [f"{other}.{key}" for other in owners if not {other, f"{other}.{key}"} & {*qualified}]
    return whole_flag(key if short == [name] else name)


def width() -> int:
    """Returns the columns of ``COLUMNS`` or of the terminal, also that of a pager; the widest where there is none."""
    columns = shutil.get_terminal_size((0, 0)).columns
    for stream in (sys.__stderr__, sys.__stdin__):
        if columns == 0 and stream is not None:
            try:
                columns = os.get_terminal_size(stream.fileno()).columns
            except (OSError, ValueError):  # no terminal, or closed
                continue
    return min(max(columns, _NARROWEST), _WIDEST) if columns else _WIDEST


def wrap(text: str, columns: int | None = None, *, indent: str = "", start: str = "") -> list[str]:
    """Returns the lines of a text with whole words: no line breaks at the hyphen of an option's name.

    The first line begins with ``start``, the others with ``indent``. Without ``columns`` they fill the terminal.
    """
    return textwrap.wrap(
        " ".join(text.split()),
        width() if columns is None else columns,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def examples_in(doc: str) -> str:
    """Returns the block of commands behind ``::`` in a module's docstring; empty where there is none."""
    _, mark, rest = doc.partition("\n::\n\n")
    lines = []
    for line in rest.splitlines() if mark else ():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip()


class HelpText(HelpFormatter):
    """A formatter that adds the default of every option to its text, and keeps the lines of examples."""

    def __init__(self, prog: str) -> None:
        columns = width()
        super().__init__(prog, max_help_position=min(34, columns // 3), width=columns)

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.nargs == 0 or re.search(r"\b(default|required|optional)\b", text):
            return text
        missing = "required" if action.required else "optional"
        if not action.required and action.default is not None:
            missing = f"default {action.default:g}" if isinstance(action.default, float) else "default %(default)s"
        return f"{text} ({missing})"

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return "N" if action.type is int else "X" if action.type is float else "TEXT"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs are filled, indented lines stay as they are."""
        lines: list[str] = []
        for line in text.splitlines():
            is_kept = not line or line.startswith(" ")
            lines += [line] if is_kept else wrap(line, width - len(indent))
        return "\n".join(indent + line if line else line for line in lines)


# -- fields in words ---------------------------------------------------------------------------------------------------

FOLDERS = r"(path|_dir|folder)$"
"""Pattern of the names of fields that hold a file or a folder."""


@dataclass(frozen=True, kw_only=True)
class FieldWords:
    """One field of a record."""

    text: str
    """Text of its docstring."""
    short: str
    """The first sentence of ``text``, without the clause about None."""
    kind: str
    """The type in words: ``a whole number or text``."""
    place: str
    """Placeholder of a value: ``N|TEXT``."""
    default: str | None
    """The default as a user writes it; None: the field must be given."""
    left_out: str
    """``default 4``, ``default: as many as num_heads``, ``optional``, or ``required in the file``."""
    choices: tuple[str, ...] = ()


def field_words(record: type, name: str, choices: Sequence[str] = ()) -> FieldWords:
    """Returns the words of a field of a record, which takes one of ``choices`` if there are any."""
    field = next(each for each in fields(record) if each.name == name)
    text = field_texts(record)[name]
    first, _, rest = re.sub(r"[.;] null: ", "\n", text).partition("\n")
    value = field.default if field.default_factory is MISSING else field.default_factory()
    default, left_out = None, "required in the file"
    if value is not MISSING:
        default = f"{value:g}" if isinstance(value, float) else as_text(value)
        left_out = f"default {default}" if default else "default: none"
    if default == "null":
        unset = re.split(r"[.;](?: |$)", rest)[0]
        left_out = f"default: {unset}" if unset else "optional"
    place = "|".join(map(_place_of, kinds_of(field.type)))
    if choices:
        listed = "|".join(choices)
        place = listed if len(listed) <= _NARROW else "NAME"
    elif place == "TEXT" and re.search(FOLDERS, field.name):
        place = "PATH"
    return FieldWords(
        text=text,
        short=re.split(r"\. (?=[A-Z])", first)[0].rstrip("."),
        kind=" or ".join(map(_kind, kinds_of(field.type))),
        place=place,
        default=default,
        left_out=left_out,
        choices=tuple(choices),
    )


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Returns the types that a field may hold, except None."""
    members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return tuple(member for member in members if member is not NoneType)


def takes_list(kind: Any) -> bool:
    """Returns whether a field of this type may hold several values."""
    return any(get_origin(member) is tuple for member in kinds_of(kind))


def _kind(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {_MANY.get(get_args(kind)[0], 'values')}"
    if is_dataclass(kind):
        return f"a mapping of {', '.join(field.name for field in fields(kind))}"
    return _WORDS.get(kind, "a value")


def _place_of(kind: Any) -> str:
    item = _PLACES.get(get_args(kind)[0] if get_origin(kind) is tuple else kind, "MAPPING")
    return f"{item},{item},..." if get_origin(kind) is tuple else item


@cache
def field_texts(record: type) -> dict[str, str]:
    """The docstring below each field of a record, inherited ones too, as plain text; under the empty name that of the
    record, its head."""
    texts: dict[str, str] = {}
    for owner in reversed(record.__mro__):
        if not is_dataclass(owner):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(body, ast.ClassDef)
        texts[""] = _plain(inspect.getdoc(owner) or "").split("\n\n")[0].rstrip(".")
        for field, below in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=text)):
                        texts[field.target.id] = _plain(str(text))
                    case _:
                        texts[field.target.id] = ""
    return texts


def _plain(text: str) -> str:
    """Returns a docstring without its marks, in the words of a configuration file (``null`` for ``None``)."""
    text = re.sub(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", inspect.cleandoc(text).replace("``", ""))
    return re.sub(r"\bNone\b", "null", re.sub(r"(?<!\n)\n(?!\n)", " ", text))


def as_text(value: Any) -> str:
    """Returns a value as a user writes it on the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

"""The options of ``rrfp plan``, and the small languages of their values: lists, ranges, and noise."""

import argparse
from collections.abc import Sequence

from rrfp_jax.commands.common.options import CommandParser, offer
from rrfp_jax.commands.training.config_sources import add_trust_argument, preset_names
from rrfp_jax.costs import Noise
from rrfp_jax.costs.devices import DEVICES
from rrfp_jax.costs.layer_sizes import REMAT_NAMES
from rrfp_jax.planner.candidates import PLANNED_HINTS
from rrfp_jax.planner.search_space import CONSUMPTIONS, READY, STRICT
from rrfp_jax.schedules import schedule_entry, schedule_names
from rrfp_jax.schedules.request import TWO_WAYS

ORDER_NAMES = (*(name for name in schedule_names() if schedule_entry(name).shape is not TWO_WAYS), *PLANNED_HINTS)
"""Values of ``--schedules``: not the schedules that hold two copies of the model, which no cut here describes."""
_MOST = 4096
"""Numbers that a range may name."""
_NO_NOISE = "none"
_LIST = "N,N,...|A..B"
_FORMS = f"{_NO_NOISE}, lognormal:SIGMA, tail:SHARE,FACTOR"


def plan_parser(doc: str) -> CommandParser:
    """Returns the parser; the values of lists and noise are read later. ``doc`` is the command's docstring."""
    parser = CommandParser("plan", doc, usage="%(prog)s --config FILE.yaml (--device NAME | --costs FILE) [option ...]")
    config = parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="model, data and batch: a file, or a preset by name; optional with --costs, which tells the layers too",
    )
    offer(config, preset_names())
    add_trust_argument(parser)
    parser.add_argument(
        "--as-configured",
        action="store_true",
        help="forecast the run as the configuration lays it out, in place of a search: memory of every stage on "
        "devices that need not be here, and the step's time",
    )
    _add_machine(parser.add_argument_group("machine"))
    _add_choices(parser.add_argument_group("choices"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    device = add(
        "--device",
        metavar="NAME",
        help=f"costs are worked out from the record of an accelerator, which need not be here: {', '.join(DEVICES)} "
        "(default: --costs)",
    )
    offer(device, DEVICES)
    add(
        "--costs",
        metavar="FILE.json",
        help="the costs of layers, as rrfp profile measures and writes them (default: --device)",
    )
    add(
        "--compile",
        action="store_true",
        help="compile a few layers, in seconds to minutes, for --device where the compiler for it is installed, else "
        "for the devices here: they hold and compute what the compiler says, at the speed of --device, or of a layer "
        "in --costs; for --microbatch-size, --tensor and "
        "--remat, which are then the configuration's own where they are not given",
    )
    add(
        "--devices",
        type=int,
        metavar="N",
        help="how many there are, all of which are used (default: as many as the configuration has)",
    )
    add("--memory", metavar="SIZE", help="memory of each device, as 72GiB (default: that of the device, if known)")
    add(
        "--jitter",
        metavar="FORM",
        help=f"how durations vary from step to step: {_FORMS}, or the last two joined by + (default: as --costs tell, "
        "else none)",
    )


def _add_choices(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--batch-size", type=int, metavar="N", help="samples of a step (default: as many as the configuration has)")
    add(
        "--microbatches",
        metavar=_LIST,
        help="microbatches of each replica (default: as many as the batch makes; without a batch required)",
    )
    add(
        "--microbatch-size",
        metavar=_LIST,
        help="samples of a microbatch (default: the configuration's own and 1, 2, 4 and 8, as far as they divide the "
        "batch; with --costs all that it has)",
    )
    add("--stages", metavar=_LIST, help="stages of the pipeline (default: every number that divides the devices)")
    add("--replicas", metavar=_LIST, help="replicas of the pipeline (default: every number that divides the devices)")
    add(
        "--tensor",
        metavar=_LIST,
        help="devices that share every layer (default: 1, 2, 4 and 8 as far as they divide the model; with --costs all "
        "that it has)",
    )
    add("--chunks-per-stage", metavar=_LIST, help="chunks on every stage (default: 1, 2 and 4)")
    schedules = add(
        "--schedules",
        metavar="A,B,...",
        help=f"these orders alone, and none is searched for: {', '.join(ORDER_NAMES)} (default: all, and a search)",
    )
    offer(schedules, ORDER_NAMES)
    consume = add(
        "--consume",
        metavar="A,B",
        help=f"how stages follow tables: {STRICT}, {READY} or both (default both)",
    )
    offer(consume, CONSUMPTIONS)
    remat = add(
        "--remat",
        metavar="A,B,...",
        help=f"what backwards may recompute: {', '.join(REMAT_NAMES)} (default: as the configuration says, if not "
        "none; else none, dots and full; with --costs all that it has); where nothing is measured or compiled, a name "
        "that keeps attention or experts is counted as full",
    )
    offer(remat, REMAT_NAMES)


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--top", type=int, default=5, metavar="N", help="how many of the ranking are told (default 5)")
    add(
        "--write",
        metavar="FILE.yaml",
        help="write the best one as a configuration for rrfp train, and beside it its table where no name stands for "
        "that (default: it is only told)",
    )
    add("--json", action="store_true", help="one JSON object on the last line of stdout, instead of tables")


def parse_counts(text: str | None, flag: str) -> tuple[int, ...] | None:
    """Reads ``8,16,32`` or ``8..64``, both ends included, or several of them; None: not given.

    Raises ValueError for any other text.
    """
    if text is None:
        return None
    try:
        ranges = [[int(end) for end in part.split("..")] for part in text.split(",")]
    except ValueError:
        ranges = [[]]
    if any(not 1 <= len(ends) <= 2 or ends[0] > ends[-1] or ends[0] < 1 for ends in ranges):
        raise ValueError(
            f"{flag} {text!r} is no list of numbers of at least 1: write 8,16,32, or 8..64 for all between"
        )
    if sum(ends[-1] - ends[0] for ends in ranges) >= _MOST:
        raise ValueError(f"{flag} {text} names more than {_MOST:,} numbers: give fewer")
    return tuple(dict.fromkeys(number for ends in ranges for number in range(ends[0], ends[-1] + 1)))


def parse_words(text: str | None, flag: str, known: Sequence[str]) -> tuple[str, ...] | None:
    """Reads ``none,dots``; None: not given. Raises ValueError for words that are not among ``known``."""
    if text is None:
        return None
    words = tuple(dict.fromkeys(text.split(",")))
    wrong = [word for word in words if word not in known]
    if wrong:
        raise ValueError(f"{flag} names {wrong[0]!r}: choose among {', '.join(known)}")
    return words


def parse_noise(text: str) -> Noise:
    """Reads ``none``, ``lognormal:0.2``, ``tail:0.01,5`` or the last two joined by ``+``; raises ValueError on
    others."""
    sigma, tail = 0.0, (0.0, 1.0)
    for part in () if text == _NO_NOISE else text.split("+"):
        name, _, argument = part.partition(":")
        try:
            numbers = [float(number) for number in argument.split(",")]
        except ValueError:
            numbers = []
        if name == "lognormal" and len(numbers) == 1:
            sigma = numbers[0]
        elif name == "tail" and len(numbers) == 2:
            tail = numbers[0], numbers[1]
        else:
            raise ValueError(f"jitter {part!r} is unknown: write one of {_FORMS}, or the last two joined by +")
    noise = Noise.alike(sigma)
    return Noise(sigma=noise.sigma, tail=tail[0], tail_factor=tail[1])

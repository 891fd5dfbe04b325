"""Draws the pictures of the documentation, as SVG: `python docs/pictures.py`. The site's build and a test hold the files to it.

Each has a card of its own colours behind it, for light and for dark screens, and is readable at the width of a phone.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
WIDTH = 380
STYLE = """<style>
text { font: 11px system-ui, sans-serif; fill: #1c2733; }
.title { font-weight: 600; }
.small { font-size: 9.5px; }
.card { fill: #ffffff; stroke: #c3ccd6; }
.box { fill: #e8eef4; stroke: #8fa1b3; }
.compute { fill: #cfe3d4; stroke: #5e9a6d; }
.gather { fill: #cfdff5; stroke: #5b86bf; }
.reduce { fill: #f6dcc4; stroke: #c1864a; }
.whole { fill: #e3d5f2; stroke: #8d68b8; }
.line { stroke: #8fa1b3; fill: none; }
@media (prefers-color-scheme: dark) {
text { fill: #e4eaf0; }
.card { fill: #1b222b; stroke: #465463; }
.box { fill: #2b3642; stroke: #6d7f92; }
.compute { fill: #264632; stroke: #68ab79; }
.gather { fill: #243b59; stroke: #6c9bd8; }
.reduce { fill: #553a1f; stroke: #d39a5e; }
.whole { fill: #3f2f55; stroke: #a684d1; }
.line { stroke: #6d7f92; }
}
</style>"""

LAYERS = [
    [("your loop, trainers, engine", "forward, backward, step, read, write, save")],
    [("hooks", "turn torch's events into calls")],
    [("schedule", "the order of gathers and reductions; legal calls")],
    [("unit", "a flat buffer, its views, one table of states")],
    [("parameter buckets", "shards to rows"), ("gradient buckets", "gradients to means")],
    [("transport", "five operations between ranks")],
    [("storage", "accelerator, CPU memory, disk")],
    [("layout", "the rank that holds each element")],
]
"""Rows of boxes from top to bottom, each (name, task)."""

SLOT = 32
LANES = ["all-gather", "compute", "reduce-scatter", "block 1", "block 2", "block 3"]
EVENTS = [
    ("all-gather", "gather", [(0, 1, "1"), (1, 2, "2"), (2, 3, "3"), (4, 5, "2"), (5, 6, "1")]),
    ("compute", "compute", [(1, 2, "F1"), (2, 3, "F2"), (3, 4, "F3"), (4, 5, "B3"), (5, 6, "B2"), (6, 7, "B1"), (8, 9, "step")]),
    ("reduce-scatter", "reduce", [(5, 6, "3"), (6, 7, "2"), (7, 8, "1")]),
    ("block 1", "whole", [(0, 2, "unsharded"), (5, 7, "unsharded")]),
    ("block 2", "whole", [(1, 3, "unsharded"), (4, 6, "unsharded")]),
    ("block 3", "whole", [(2, 5, "unsharded")]),
]  # fmt: skip
"""(lane, colour, [(first slot, last slot, label)]) of a step at stage 3 with three blocks and one microbatch."""


PARAMETER = [
    ("box", "at rest: this rank's shard", "ParameterBucket.block"),
    ("gather", "its module is about to run", "Hooks, Schedule.unshard, Unit.start_unshard"),
    ("gather", "all-gather into the unit's flat buffer", "ParameterBucket.unshard, Collectives.all_gather"),
    ("whole", "whole: the parameter shows its view", "Unit.unshard, Appearance.show"),
    ("compute", "forward; autograd saves unit and place", "SavedParameters"),
    ("box", "it has run: a placeholder, and no memory", "Schedule.reshard_after_forward, Unit.reshard"),
    ("gather", "its output has a gradient: gathered again", "Hooks._pre_backward"),
    ("compute", "backward; freed at the last gradient", "Hooks._give_back, Unit.reshard"),
    ("box", "the optimizer updates the shard", "ShardedStep, Resident"),
]
"""A parameter's way through a step at stage 3, from top to bottom: (colour, state or event, the code)."""
GRADIENT = [
    ("compute", "autograd has summed it", "Hooks._post_accumulate, Schedule.add_gradient"),
    ("box", "waits for others of its unit", "Waiting"),
    ("box", "copied into the rows of its bucket", "GradientBucket.add_gradients"),
    ("reduce", "the bucket's turn: reduce-scatter", "Reductions.start_ready, Collectives.reduce_scatter"),
    ("reduce", "the mean, in this rank's shard", "GradientBucket.finish_reduction"),
    ("box", "one message: norm, used, written", "ShardedStep, GradientOperations"),
    ("compute", "the user's optimizer, on views", "UsersOptimizer, SubGroups.run"),
    ("gather", "all-gather of updated parameters", "Schedule.sync_parameters, ParameterBucket.sync"),
    ("whole", "the first reader waits for it", "Unit.before_read, Unit.unshard"),
]
"""A gradient's way through a step at stage 2, in the same form."""


def svg(height: int, title: str, parts: list[str]) -> str:
    """Return a picture of `WIDTH` x `height` units on its card."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH * 1.6:.0f}" role="img">'
    )
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([head, f"<title>{title}</title>", STYLE, card, *parts, "</svg>", ""])


def box(colour: str, x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle."""
    return f'<rect class="{colour}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'


def text(words: str, x: float, y: float, style: str = "", anchor: str = "middle") -> str:
    """Return a line of text."""
    return f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def architecture() -> str:
    """Draw the layers of the package: each imports only those below."""
    parts = []
    y = 12
    for number, row in enumerate(LAYERS):
        width = (WIDTH - 32 - 8 * (len(row) - 1)) / len(row)
        for place, (name, task) in enumerate(row):
            x = 16 + place * (width + 8)
            parts += [
                box("box", x, y, width, 36),
                text(name, x + width / 2, y + 15, "title"),
                text(task, x + width / 2, y + 29, "small"),
            ]
        y += 36
        if number + 1 < len(LAYERS):
            parts.append(f'<path class="line" d="M{WIDTH / 2:g} {y} v10 m-3 -4 l3 4 l3 -4"/>')
            y += 12
    return svg(y + 12, "The layers of zeroshard; each imports only those below it", parts)


def timeline() -> str:
    """Draw a step at stage 3 of a model with three blocks: the computation, and the time in which each block is unsharded."""
    left = 84
    arrow = f"M{left + 26} 15 h{9 * SLOT - 34} m-5 -3 l5 3 l-5 3"
    parts = [text("time", left, 18, "small", "start"), f'<path class="line" d="{arrow}"/>']
    tops = {}
    y = 28
    for lane in LANES:
        if lane == "block 1":
            y += 8
        tops[lane] = y
        parts.append(text(lane, 79, y + 14, "small", "end"))
        y += 26
    for lane, colour, events in EVENTS:
        for first, last, label in events:
            x = left + first * SLOT
            width = (last - first) * SLOT - 2
            parts += [box(colour, x, tops[lane], width, 20), text(label, x + width / 2, tops[lane] + 14, "small")]
    parts.append(text("F: forward, B: backward, of block 1, 2, 3", WIDTH / 2, y + 12, "small"))
    return svg(y + 24, "A step at stage 3: gathers, computation, reductions, and when each block is unsharded", parts)


def way(title: str, stops: list[tuple[str, str, str]]) -> str:
    """Draw a way from top to bottom: what happens, and the code that does it."""
    parts = []
    y = 12
    for number, (colour, event, code) in enumerate(stops):
        parts += [
            box(colour, 16, y, WIDTH - 32, 34),
            text(event, WIDTH / 2, y + 14, "title"),
            text(code, WIDTH / 2, y + 27, "small"),
        ]
        y += 34
        if number + 1 < len(stops):
            parts.append(f'<path class="line" d="M{WIDTH / 2:g} {y} v8 m-3 -4 l3 4 l3 -4"/>')
            y += 10
    return svg(y + 12, title, parts)


def parameter() -> str:
    """Draw a parameter's way."""
    return way("A parameter's way through a step at stage 3", PARAMETER)


def gradient() -> str:
    """Draw a gradient's way."""
    return way("A gradient's way through a step at stage 2", GRADIENT)


PICTURES = {
    "architecture.svg": architecture, "stage_3_step.svg": timeline, "parameters_way.svg": parameter,
    "gradients_way.svg": gradient,
}  # fmt: skip


def outdated() -> list[str]:
    """List the pictures whose file is not what the script draws."""
    return [name for name, draw in PICTURES.items() if _kept(name) != draw()]


def _kept(name: str) -> str:
    path = HERE / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")

"""What a matplotlib figure shows, as plain data: lines, points, bars, wedges and boxes with their labels and scales.

Loaded by the kernel when the first figure is shown. It reads what artists say of themselves and draws nothing.
"""

import datetime
import decimal
import re

UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")
DIGITS = 8  # that a value which was computed from others keeps, fewer before the point


def chart(figure):
    """The chart of a figure: of its one axes, or of all of them together; None for an empty one."""
    axes = figure.get_axes()
    if not any(a.has_data() for a in axes):
        return None
    if len(axes) > 1:
        return {"type": "superchart", "title": figure.get_suptitle(), "elements": [axes_chart(a) for a in axes]}
    return axes_chart(axes[0])


def axes_chart(axes):
    kind = kind_of(axes)
    result = {"type": kind, "title": axes.get_title() or None}
    if kind in ("line", "scatter", "bar", "box_and_whisker"):
        result.update(labels(axes))
    if kind in ("line", "scatter"):
        result.update(scale(axes, "x"))
        result.update(scale(axes, "y"))
    result["elements"] = ELEMENTS[kind](axes, result)
    return result


def kind_of(axes):
    """Told by what was drawn, whatever function drew it."""
    from matplotlib import collections, lines, patches, text

    drawn = [artist for artist in axes._children if not isinstance(artist, text.Text)]  # without axis, spines, legend

    def only(*kinds):
        return all(isinstance(artist, kinds) for artist in drawn)

    if only(lines.Line2D):
        return "line"
    if only(patches.PathPatch, lines.Line2D):
        return "box_and_whisker"
    drawn = [a for a in drawn if not (isinstance(a, lines.Line2D) and is_grid(a))]
    for name, kind in (("scatter", collections.PathCollection), ("pie", patches.Wedge), ("bar", patches.Rectangle)):
        if only(kind):
            return name
    return "unknown"


def is_grid(line):
    """A line between two points, level or upright: somebody's help for the eye."""
    x, y = line.get_xdata(), line.get_ydata()
    return len(x) == len(y) == 2 and bool(x[0] == x[1] or y[0] == y[1])


def labels(axes):
    found = {"x_label": axes.get_xlabel() or None, "y_label": axes.get_ylabel() or None}
    for name in ("x", "y"):
        match = UNIT.search(found[name + "_label"] or "")
        found[name + "_unit"] = (match.group(1) or match.group(2)) if match else None
    return found


def turn(result):
    """Swap what is said of the two axes."""
    for what in ("label", "unit"):
        x, y = "x_" + what, "y_" + what
        result[x], result[y] = result[y], result[x]


def texts(axes, name):
    return [label.get_text() for label in (axes.get_xticklabels() if name == "x" else axes.get_yticklabels())]


def scale(axes, name):
    axis = axes.xaxis if name == "x" else axes.yaxis
    shown, ticks = texts(axes, name), list(axes.get_xticks() if name == "x" else axes.get_yticks())
    if shows_dates(axis):
        from matplotlib import dates

        kind, ticks = "datetime", [dates.num2date(tick).isoformat() for tick in ticks]
    else:
        if ticks and isinstance(ticks[0], (int, float)):
            ticks = [float(tick) for tick in ticks]
        kind = axis.get_scale()
        if kind == "linear" and is_categorical(ticks, shown):
            kind = "categorical"
    return {name + "_ticks": [plain(t) for t in ticks], name + "_tick_labels": shown, name + "_scale": kind}


def shows_dates(axis):
    from matplotlib import dates

    converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter  # its name since 3.10
    return isinstance(converter, getattr(dates, "_SwitchableDateConverter", dates.DateConverter))


def is_categorical(ticks, shown):
    """Ticks that count from zero, and say something else than their number."""
    pairs = list(zip(ticks, shown))
    return bool(pairs) and all(isinstance(t, (int, float)) and t == i and text != str(i) for i, (t, text) in enumerate(pairs))


def plain(value):
    """A number, or a text: dates in ISO's way."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind == "M":
        return str(value.astype("datetime64[s]"))
    if isinstance(value, str):
        return str(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def points(x, y):
    return [[plain(a), plain(b)] for a, b in zip(x, y)]


def line_elements(axes, result):
    found = []
    for line in axes.get_lines():
        if not is_grid(line):
            found.append({"label": named(line, "_child", "Line"), "points": points(line.get_xdata(), line.get_ydata())})
    return found


def scatter_elements(axes, result):
    found = []
    for collection in axes.collections:
        offsets = collection.get_offsets()
        found.append({"label": str(collection.get_label()), "points": points(offsets[:, 0], offsets[:, 1])})
    return found


def named(artist, prefix, word):
    """An artist's label; a number where it was given none."""
    label = str(artist.get_label())
    number = label[len(prefix):]
    return "%s %d" % (word, int(number)) if label.startswith(prefix) and number.isdigit() else label


def bar_elements(axes, result):
    found = []
    for container in axes.containers:
        group = named(container, "_container", "Group")
        values, names = [bar.get_height() for bar in container], texts(axes, "x")
        if all(v == values[0] for v in values):  # they lie: what differs is how far they reach
            turn(result)
            values, names = [bar.get_width() for bar in container], texts(axes, "y")
        found += [{"label": name, "group": group, "value": float(v)} for name, v in zip(names, values)]
    return found


def pie_elements(axes, result):
    return [{"label": str(wedge.get_label()), "angle": abs(float(rounded(exact(wedge.theta2) - exact(wedge.theta1)))),
             "radius": float(wedge.r)} for wedge in axes.patches]


def exact(value):
    return decimal.Decimal(float(value))


def rounded(value):
    """Without the last digits, which computing has made up."""
    value = value if isinstance(value, decimal.Decimal) else decimal.Decimal(str(value))
    return decimal.Context(prec=max(1, DIGITS - value.adjusted())).plus(value)


class Box:
    """One box, as if it stood upright: along is where it stands, up is what it measures."""

    def __init__(self, label, along, up):
        self.label = label
        self.left, self.right = min(along), max(along)
        self.low, self.high = min(up), max(up)
        self.median = self.bottom = self.top = None
        self.outliers = []

    def take(self, along, up):
        """Take a line that belongs to this box."""
        low, high = min(up), max(up)
        if low == high and self.low <= low <= self.high:
            self.median = low
        elif high == self.low:
            self.bottom = low
        elif low == self.high:
            self.top = high

    def element(self):
        values = {
            "min": self.low if self.bottom is None else self.bottom, "first_quartile": self.low,
            "median": self.low if self.median is None else self.median, "third_quartile": self.high,
            "max": self.high if self.top is None else self.top,
        }
        return dict({k: float(v) for k, v in values.items()}, label=self.label, outliers=[float(v) for v in self.outliers])


def box_elements(axes, result):
    shapes = [patch.get_path().vertices for patch in axes.patches]
    corners = [([rounded(x) for x in v[:, 0]], [rounded(y) for y in v[:, 1]]) for v in shapes]
    heights = {max(y) - min(y) for _, y in corners}
    lying = len(heights) == 1
    if lying:
        turn(result)
    boxes = [Box(name, *(c[::-1] if lying else c)) for name, c in zip(texts(axes, "x"), corners)]
    for line in axes.lines:
        along, up = [rounded(v) for v in line.get_xdata()], [rounded(v) for v in line.get_ydata()]
        if lying:
            along, up = up, along
        if not along:
            continue
        box = next((b for b in boxes if b.left <= along[0] and along[-1] <= b.right), None)
        if box is None:
            continue
        if line.get_linestyle() in ("None", "", " ") or len(along) == 1:
            box.outliers += up
        elif len(up) == 2:
            box.take(along, up)
    return [box.element() for box in boxes]


ELEMENTS = {
    "line": line_elements, "scatter": scatter_elements, "bar": bar_elements, "pie": pie_elements,
    "box_and_whisker": box_elements, "unknown": lambda axes, result: [],
}

"""What a kernel holds after a cell: names, types and values, told without running any code of the user's.

No method of an object is called, and none is hashed, compared or asked for its truth: a class may answer all of that in its
own way. A value is told only where its type is exactly one of Python's own, or one of the few whose real class is known.
Everything is bounded: how many variables, how long their texts, how many elements are looked at. Whatever goes wrong, the
answer is None and the kernel lives on.
"""

import time
import types
from json.encoder import encode_basestring_ascii as quoted

MAX_VARIABLES = 500
MAX_VALUE = 1000  # characters of one value
MAX_BYTES = 512 << 10  # of all variables, as JSON; an agent takes a MiB of everything
MAX_MODULES = 2000
MAX_MODULE = 64  # characters of a module's name
MAX_NODES = 200  # elements of one container that are looked at
MAX_ALL_NODES = 30_000  # elements of all containers, which take 10 to 20 ms
MAX_DEPTH = 4
MAX_BITS = 4096  # of an integer that is written out
# The counts above decide how much is told, so that it is the same on every machine. These two only keep a cell's end from
# being late: time on the CPU, which a busy machine does not use up, and time that passes, which it does.
MAX_CPU_SECONDS = 0.2
MAX_SECONDS = 2
UNKNOWN = "<non-serializable>"
HEAP_TYPE = 1 << 9  # a class that was made in Python; those of C extensions are mostly static

type_name = type.__dict__["__name__"].__get__  # past whatever a metaclass makes of it
type_flags = type.__dict__["__flags__"].__get__
type_order = type.__dict__["__mro__"].__get__
type_dict = type.__dict__["__dict__"].__get__
KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
TABLES = {"numpy": "ndarray", "pandas.core.frame": "DataFrame", "pandas.core.series": "Series",
          "pandas.core.indexes.base": "Index", "pandas.core.indexes.range": "RangeIndex",
          "pandas.core.indexes.datetimes": "DatetimeIndex", "pandas.core.indexes.multi": "MultiIndex"}


def snapshot(namespace, hidden, modules, known):
    """The variables of a namespace and the modules that are loaded; known is kept from call to call."""
    try:
        variables, truncated = Snapshot(modules).variables(namespace, hidden)
        return {"variables": variables, "modules": loaded(modules, known), "truncated": truncated}
    except BaseException:  # an interrupt is not meant for this, and what is told is not worth a kernel
        return None


def loaded(modules, known):
    """The top names of what was imported; asked for after every cell, so it is made anew only when there is more."""
    if known.get("size") != len(modules):
        names = {name.partition(".")[0][:MAX_MODULE] for name in list(modules) if type(name) is str and not name.startswith("_")}
        known["size"], known["names"] = len(modules), sorted(names)[:MAX_MODULES]
    return known["names"]


def name_of(kind):
    """The name of a class, unless it is one that answers in its own way."""
    name = type_name(kind)
    return name[:128] if type(name) is str else "class"


def shorten(text):
    return text if len(text) <= MAX_VALUE else text[:MAX_VALUE - 3] + "..."


def brackets(kind):
    """What a container of Python's own is written in; None for any other."""
    if kind is list:
        return "[]"
    if kind is tuple:
        return "()"
    return "{}" if kind is dict or kind is set or kind is frozenset else None


def scalar(value, kind):
    """The text of a value whose type is exactly one of Python's own; None for any other."""
    if value is None or kind is bool or kind is float or kind is complex:
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() <= MAX_BITS else "<int of %d bits>" % value.bit_length()
    if kind is str or kind is bytes:
        return repr(value[:MAX_VALUE])
    if kind is bytearray:
        return repr(bytes(value[:MAX_VALUE]))
    if kind is range or kind is slice:
        return repr(value) if all(small(v) for v in (value.start, value.stop, value.step)) else None
    return None


def small(value):
    return value is None or type(value) is int and value.bit_length() <= MAX_BITS


class Container:
    """Writes a list, tuple, dict or set out, as far as it is worth reading."""

    def __init__(self):
        self.nodes = MAX_NODES

    def text(self, value, depth):
        kind = type(value)
        around = brackets(kind)
        if around is None:
            told = scalar(value, kind)
            return "<%s>" % name_of(kind) if told is None else told
        opening, closing = around
        if depth >= MAX_DEPTH:
            return opening + "..." + closing
        try:
            parts = self.items(value, kind, depth)
        except RuntimeError:  # another thread changes it
            return opening + "..." + closing
        if (kind is set or kind is frozenset) and not parts:
            return name_of(kind) + "()"
        if kind is tuple and len(value) == 1:
            parts = [parts[0], ""] if parts else parts
        return opening + ", ".join(parts).rstrip(" ") + closing

    def items(self, value, kind, depth):
        parts, size = [], 0
        for item in value.items() if kind is dict else value:
            if self.nodes <= 0 or size > MAX_VALUE:
                parts.append("...")
                break
            self.nodes -= 1
            if kind is dict:
                part = self.text(item[0], depth + 1) + ": " + self.text(item[1], depth + 1)
            else:
                part = self.text(item, depth + 1)
            parts.append(part)
            size += len(part)
        return parts


class Snapshot:
    """One look at a namespace."""

    def __init__(self, modules):
        self.modules = modules
        self.tables = None  # the classes of TABLES that are loaded, found when the first one is needed
        self.nodes = MAX_ALL_NODES
        self.cpu_until, self.until = time.thread_time() + MAX_CPU_SECONDS, time.monotonic() + MAX_SECONDS

    def late(self):
        return time.thread_time() > self.cpu_until or time.monotonic() > self.until

    def variables(self, namespace, hidden):
        left, told = MAX_BYTES, {}
        for name, value in list(dict.items(namespace)):
            if type(name) is not str or name.startswith("_") or name in ("In", "Out") or name in hidden and hidden[name] is value:
                continue
            if len(told) >= MAX_VARIABLES or left <= 0 or self.nodes <= 0 or self.late():
                return told, True
            entry = {"type": name_of(type(value)), "value": self.describe(value)}
            told[name[:256]] = entry
            left -= len(quoted(name[:256])) + len(quoted(entry["type"])) + len(quoted(entry["value"])) + 32
        return told, False

    def describe(self, value):
        kind = type(value)
        if kind is str:
            return shorten(value)
        if brackets(kind) is not None:
            container = Container()
            text = container.text(value, 0)
            self.nodes -= MAX_NODES - container.nodes
            return shorten(text)
        text = scalar(value, kind)
        if text is None:
            try:
                text = self.summary(value, kind)
            except BaseException:
                text = None
        return UNKNOWN if text is None else shorten(text)

    def summary(self, value, kind):
        """What is known of some classes of others: the shape of a table, never its content."""
        if kind is types.ModuleType:
            return "<module>"
        table = self.table(kind)
        if table == "ndarray" and not type_flags(kind) & HEAP_TYPE:
            return "array of shape %s, %s" % (value.shape, number(value.dtype))
        if table == "DataFrame":
            rows, columns = self.axes(value)
            return "%d rows x %d columns: %s" % (len(rows), len(columns), names(columns))
        if table == "Series":
            return "%d rows" % len(self.axes(value)[0])
        return None

    def table(self, kind):
        """Which of TABLES a class is."""
        if self.tables is None:
            self.tables = [(vars(module).get(TABLES[name]), TABLES[name]) for name, module in list(dict.items(self.modules))
                           if type(name) is str and name in TABLES and type(module) is types.ModuleType]
        return next((name for found, name in self.tables if found is kind), None)

    def axes(self, table):
        """The index and the columns of a DataFrame as it keeps them, rows first."""
        manager = own_dict(table)["_mgr"]
        held = descriptor(manager, "axes")
        axes = own_dict(manager)["axes"] if held is None else held.__get__(manager)
        if type(axes) is not list or any(self.table(type(axis)) is None for axis in axes):
            raise TypeError("an index of another kind")
        return axes[::-1]


def descriptor(value, name):
    """What a class of C keeps, past whatever a class of the user's makes of it; None where no class knows the name."""
    for kind in type_order(type(value)):
        if name in type_dict(kind):
            found = type_dict(kind)[name]
            if type(found) is types.GetSetDescriptorType or type(found) is types.MemberDescriptorType:
                return found
            raise TypeError("not kept by a class of C")
    return None


def own_dict(value):
    """The attributes of an object, as they are kept."""
    found = descriptor(value, "__dict__")
    held = None if found is None else found.__get__(value)
    if type(held) is not dict:
        raise TypeError("no dictionary of its own")
    return held


def number(dtype):
    return KINDS[dtype.kind] + str(dtype.itemsize * 8) if dtype.kind in KINDS else dtype.str


def names(columns):
    some = [c for c in columns[:20].tolist() if type(c) is str]
    return ", ".join(some) + (", ..." if len(columns) > len(some) else "")

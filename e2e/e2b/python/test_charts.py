"""Figures as data: the seven kinds of chart that the SDK knows."""

import pytest

PLOT = "import matplotlib.pyplot as plt, numpy as np, datetime as dt\n"


def chart(code, program):
    run = code.run_code(PLOT + program + "\nplt.show()")
    assert run.error is None, run.error.traceback
    return next(r.chart for r in run.results if r.png)


@pytest.mark.proves("run_code")
def test_line(code):
    c = chart(code, "plt.plot([0, 1, 2], [1, 4, 9], label='squares')\nplt.xlabel('Time (s)')\nplt.ylabel('Size [m]')\nplt.title('Growth')\nplt.legend()")
    assert (c.type.value, c.title, c.x_label, c.x_unit, c.y_label, c.y_unit) == ("line", "Growth", "Time (s)", "s", "Size [m]", "m")
    assert [(line.label, [tuple(p) for p in line.points]) for line in c.elements] == [("squares", [(0, 1), (1, 4), (2, 9)])]
    assert c.x_scale.value == "linear" and c.y_scale.value == "linear"
    assert c.x_ticks and c.x_tick_labels


@pytest.mark.proves("run_code")
def test_line_over_dates(code):
    c = chart(code, "plt.plot([dt.date(2024, 1, i) for i in (1, 2, 3)], [1, 2, 3])")
    assert c.type.value == "line" and c.x_scale.value == "datetime"
    assert c.elements[0].points[0][0].startswith("2024-01-01")
    assert c.elements[0].label == "Line 0" and c.title is None


@pytest.mark.proves("run_code")
def test_log_scale(code):
    c = chart(code, "plt.plot([1, 10, 100], [1, 2, 3])\nplt.xscale('log')")
    assert c.x_scale.value == "log"


@pytest.mark.proves("run_code")
def test_scatter(code):
    c = chart(code, "plt.scatter([1, 2], [3, 4], label='A')\nplt.scatter([5, 6], [7, 8], label='B')")
    assert c.type.value == "scatter"
    assert [(s.label, [tuple(p) for p in s.points]) for s in c.elements] == [("A", [(1, 3), (2, 4)]), ("B", [(5, 7), (6, 8)])]


@pytest.mark.proves("run_code")
def test_bar(code):
    c = chart(code, "plt.bar(['a', 'b', 'c'], [3, 1, 2], label='g')\nplt.xlabel('Who')\nplt.ylabel('How many')")
    assert (c.type.value, c.x_label, c.y_label) == ("bar", "Who", "How many")
    assert [(b.label, b.group, b.value) for b in c.elements] == [("a", "g", 3), ("b", "g", 1), ("c", "g", 2)]


@pytest.mark.proves("run_code")
def test_pie(code):
    c = chart(code, "plt.pie([1, 1, 2], labels=['x', 'y', 'z'])\nplt.title('Cake')")
    assert (c.type.value, c.title) == ("pie", "Cake")
    assert [(s.label, round(s.angle)) for s in c.elements] == [("x", 90), ("y", 90), ("z", 180)]


@pytest.mark.proves("run_code")
def test_box_and_whisker(code):
    c = chart(code, "plt.boxplot([[1, 2, 3, 4, 5], [2, 4, 6, 8, 10]], tick_labels=['p', 'q'], patch_artist=True)")
    assert c.type.value == "box_and_whisker"
    got = [(b.label, b.min, b.first_quartile, b.median, b.third_quartile, b.max) for b in c.elements]
    assert got == [("p", 1, 2, 3, 4, 5), ("q", 2, 4, 6, 8, 10)]


@pytest.mark.proves("run_code")
def test_several_axes_are_a_superchart(code):
    c = chart(code, "fig, (a, b) = plt.subplots(1, 2)\nfig.suptitle('Both')\na.plot([1, 2], [1, 2])\nb.bar(['x', 'y'], [1, 2])")
    assert (c.type.value, c.title) == ("superchart", "Both")
    assert [e.type.value for e in c.elements] == ["line", "bar"]


@pytest.mark.proves("run_code")
def test_what_is_none_of_these_is_unknown(code):
    assert chart(code, "plt.imshow([[1, 2], [3, 4]])").type.value == "unknown"

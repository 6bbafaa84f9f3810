"""Draws the full suite's comparison: three jobs, each way to have them done, on a logarithmic scale."""

import datetime
import json
import sys

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402, the backend is chosen first

JOBS = [
    ("tti-cmd", "echo has ended"),
    ("tti-py", "1+1 answered"),
    ("tti-data", "pandas DataFrame.sum() answered"),
]
# From below: each the subjects that mean it, and its name.
WAYS = [
    (("docker",), "docker run"),
    (("runc",), "runc"),
    (("crun",), "crun"),
    (("bwrap",), "bwrap"),
    (("python3", "exec"), "plain process,\nno isolation"),
    (("zygote-fork",), "fork of the zygote,\nno isolation"),
    (("cove",), "Cove"),
]
OURS, OTHERS, BARE = "#0b6e4f", "#9aa5b1", "#d3d9e0"


def color(name):
    if name == "Cove":
        return OURS
    return BARE if "no isolation" in name else OTHERS


def label(ms):
    if ms >= 1000:
        return "%.2f s" % (ms / 1000)
    return "%.0f ms" % ms if ms >= 20 else "%.1f ms" % ms


def about(host):
    date = datetime.datetime.fromisoformat(host["date"].replace("Z", "+00:00"))
    text = "%s, %d cores, %.0f GB, Linux %s, %s" % (
        host.get("cpu", ""), host["cores"], host["memory_mb"] / 1000, host["kernel"].split("-")[0], date.strftime("%d %B %Y").lstrip("0"))
    if not host["quiet"]:
        text += "; the machine was not quiet (load %.1f)" % host["load"]
    return text


def draw(rows, host, file):
    medians = {(r["scenario"], r["subject"]): r for r in rows if r["unit"] == "ms" and r["ok"]}
    samples = [medians[job, "cove"]["n"] for job, _ in JOBS if (job, "cove") in medians]
    figure, panels = plt.subplots(1, len(JOBS), figsize=(11, 4.1), sharey=True, facecolor="white")
    longest = max((r["p50_ms"] for (s, _), r in medians.items() if s.startswith("tti-")), default=1)
    for panel, (job, title) in zip(panels, JOBS):
        for at, (subjects, name) in enumerate(WAYS):
            row = next((medians[job, s] for s in subjects if (job, s) in medians), None)
            if row is None:
                panel.text(0.55, at, "–", va="center", color="#5a6673", fontsize=9)
                continue
            panel.barh(at, row["p50_ms"], color=color(name), height=0.66)
            panel.text(row["p50_ms"] * 1.15, at, label(row["p50_ms"]), va="center", fontsize=9,
                       fontweight="bold" if name == "Cove" else "normal", color="#1f2933")
        panel.set_xscale("log")
        panel.set_xlim(0.5, longest * 9)
        panel.set_xticks([1, 10, 100, 1000], ["1 ms", "10 ms", "100 ms", "1 s"], fontsize=8, color="#5a6673")
        panel.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        panel.set_title(title, fontsize=10.5, loc="left", color="#1f2933")
        panel.grid(axis="x", color="#e8ecf0", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(length=0)
        for side in ("top", "right", "bottom", "left"):
            panel.spines[side].set_visible(False)
    panels[0].set_yticks(range(len(WAYS)), [name for _, name in WAYS], fontsize=9, color="#1f2933")
    figure.suptitle("From asking for an environment to the first answer: median of %s, logarithmic scale"
                    % (" and ".join(str(n) for n in sorted(set(samples))) or "none"), fontsize=12, x=0.012, ha="left", color="#1f2933")
    figure.text(0.012, 0.015, about(host), fontsize=8, color="#5a6673")
    figure.tight_layout(rect=(0, 0.045, 1, 0.98), w_pad=1.2)
    # Without a date in the file, the same results give the same picture.
    figure.savefig(file, dpi=160, facecolor="white", metadata={"Software": None})


def main():
    results, file = sys.argv[1:]
    with open(results) as f:
        rows = json.load(f)
    with open(results.removesuffix(".json") + ".host.json") as f:
        host = json.load(f)
    draw(rows, host, file)


if __name__ == "__main__":
    main()

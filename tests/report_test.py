"""Tables by hand-written text, pictures by what is drawn, the page by an HTML parser."""

import html.parser
import io
import re
import signal

import numpy as np
import pytest

from trace_jax import metrics, plots, progress, report, rundir

GAP = "parity/logprob_abs_diff_nats"


@pytest.fixture
def run(tmp_path):
    with rundir.open_run(tmp_path / "run", {"name": "<b>demo</b>", "optim": {"lr": 0.5}}) as opened:
        yield opened


def fill(run, count=12):
    with metrics.MetricsWriter(run, tensorboard=False) as writer:
        writer.write(20, 1.0, {"stage": "warm_start", "warm_start/loss": 2.0, "eval/accuracy": 0.3})
        for step in range(count):
            row = {"reward/mean": step / 10, GAP: 0.01, "rollout/step_s": 2.0, "sync/s": np.nan}
            if step == 0:
                row["eval/accuracy"] = 0.25
            writer.write(step, 2.0, row)


def test_summary_table_is_aligned_and_shows_before_and_after():
    rows = {"accuracy": (0.25, 0.75), "mean gap [nats]": 0.00123456, "kl": float("nan"), "n": None}
    assert report.summary_table(rows).splitlines() == [
        "accuracy         0.25 -> 0.75",
        "mean gap [nats]  0.001235",
        "kl               -",
        "n                -",
    ]


def test_comparison_table_has_mean_and_sample_deviation_over_seeds():
    rows = [
        {"mode": "qat", "seed": 0, GAP: 1.0, "eval/accuracy": 0.5},
        {"mode": "qat", "seed": 1, GAP: 3.0, "eval/accuracy": None},
        {"mode": "trace-full", "seed": 0, GAP: float("nan")},
    ]
    assert report.comparison_table(rows, [GAP, "eval/accuracy"]).splitlines() == [
        "                                 parity/     eval/",
        "mode        seeds  logprob_abs_diff_nats  accuracy",
        "----------  -----  ---------------------  --------",
        "qat             2                2 ± 1.4       0.5",  # sqrt(((1-2)^2 + (3-2)^2) / (2-1))
        "trace-full      1                      -         -",
    ]


def test_comparison_table_keeps_lags_apart():
    rows = [{"mode": "qat", "lag": lag, GAP: lag} for lag in (0, 2, 2)]
    body = [line.split() for line in report.comparison_table(rows, [GAP]).splitlines()[3:]]
    assert body == [["qat", "0", "1", "0"], ["qat", "2", "2", "2", "±", "0"]]


def test_plots_are_written_at_any_moment_of_a_run(run):
    for count in (None, 1, 12):
        if count:
            fill(run, count)
        paths = report.write_plots(run.root)
        assert [path.name for path in paths] == ["training.png", "parity.png", "speed.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_training_plot_draws_rewards_accuracy_and_the_warm_start_level(run):
    fill(run)
    warm, grpo, right = plots._training(metrics.read_metrics(run.metrics)).axes
    raw = grpo.lines[0]
    np.testing.assert_allclose(raw.get_ydata(), np.arange(12) / 10, rtol=1e-12)
    smooth = grpo.lines[1].get_ydata()  # a mean over the last three steps, fewer at the start
    np.testing.assert_allclose(smooth[[0, 1, 11]], [0.0, 0.05, 1.0], rtol=1e-12)
    assert "after warm start: 0.250" in [t.get_text() for t in grpo.get_legend().get_texts()]
    assert warm.lines[0].get_ydata() == [2.0] and right.lines[0].get_ydata() == [0.3]


def test_axes_name_what_they_show_with_units(run):
    fill(run)
    rows = metrics.read_metrics(run.metrics)
    labels = [a.get_ylabel() for draw in (plots._parity, plots._speed) for a in draw(rows).axes]
    assert all(labels)
    assert "[nats]" in labels[0] and "[s/step]" in labels[-1]
    assert plots._parity(rows).axes[0].get_yscale() == "log"


def test_an_asynchronous_run_has_a_histogram_of_ages_weighted_by_tokens(run):
    with metrics.MetricsWriter(run, tensorboard=False) as writer:
        writer.write(0, 1.0, {"eval/accuracy": 0.1})
        for step, (tokens, fresh) in enumerate([(10, 1.0), (30, 0.2)], start=1):
            ages = {0: fresh, 1: 1 - fresh}
            row = {f"rollout/staleness_{age}_fraction": share for age, share in ages.items()}
            writer.write(step, 2.0, row | {"rollout/tokens": tokens})
    assert report.write_plots(run.root)[-1].name == "staleness.png"
    steps, whole = plots._staleness(metrics.read_metrics(run.metrics)).axes
    bars = [bar.get_height() for bar in steps.patches]
    np.testing.assert_allclose(bars, [1.0, 0.2, 0.0, 0.8])
    np.testing.assert_allclose([bar.get_height() for bar in whole.patches], [0.4, 0.6])


@pytest.mark.parametrize("lags", [[0], [0, 1, 3]])
def test_comparison_plot_is_written(tmp_path, lags):
    rows = [
        {"mode": mode, "lag": lag, "seed": seed, GAP: 0.1 + seed / 50, "eval/accuracy": None}
        for mode in ("bf16", "qat")
        for lag in lags
        for seed in range(2)
    ]
    for given in (rows, []):
        path = report.comparison_plot(given, tmp_path / "sub" / "c.png")
        assert path.read_bytes().startswith(b"\x89PNG")


class Tags(html.parser.HTMLParser):
    """Collects what a browser would see."""

    def __init__(self):
        super().__init__()
        self.tags, self.sources, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_report_is_one_file_and_escapes_what_a_model_wrote(run):
    fill(run)
    attack = "<script>alert(1)</script></table><img src=x onerror=alert(1)> {0} 日本"
    run.write_samples(3, [{"prompt": "old", "response": "old"}])
    run.write_samples(5, [{"prompt": attack, "response": attack, attack: 1.0}])
    page = Tags()
    page.feed(report.write_report(run.root).read_text(encoding="utf-8"))
    assert "script" not in page.tags and "b" not in page.tags
    assert page.tags.count("img") == 3
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert page.text.count(attack) == 3 and "<b>demo</b>" in page.text
    assert "optim.lr" in page.text and "held-out sample accuracy" in page.text


def test_progress_writes_plain_lines_to_a_log(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with progress.Progress(10, "GRPO", initial=4, stream=stream) as bar:
        for step in range(5, 11):
            now[0] += 2.0
            bar.update(1, reward=step / 3)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        "5/10",
        "8/10",
        "10/10",
    ]  # 5 s apart; the end
    assert lines[0] == "GRPO 5/10 (2 s, about 10 s left): reward=1.667"


@pytest.fixture
def restored_sigint():
    """Python's own handler: a background job of a shell starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_progress_on_a_terminal_ends_its_line_on_ctrl_c(restored_sigint):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), progress.Progress(3, "GRPO", stream=stream) as bar:
        bar.update(1, reward=0.5)
        signal.raise_signal(signal.SIGINT)
    assert re.search(r"GRPO: +33%.*1/3.*reward=0.5", stream.getvalue())
    assert stream.getvalue().endswith("\n")

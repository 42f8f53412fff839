"""Compiles the training step of a configuration for a target and says what became of each site."""

import dataclasses
from collections.abc import Sequence

from trace_jax import overrides
from trace_jax.aot import compile as aot
from trace_jax.aot import step
from trace_jax.aot.survival import Survival, survival

TRAIN_STEP = "trace_jax.aot.step:train_step"
_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One compiled step."""

    target: str
    sites: list[Survival]
    compiled: aot.Compiled

    @property
    def kept(self) -> bool:
        """Every site is still there, in full."""
        return bool(self.sites) and all(site.kept for site in self.sites)


def check(
    target: str,
    config: str,
    settings: Sequence[str] = (),
    *,
    builder: str = TRAIN_STEP,
    path: tuple[str, ...] = (),
    timeout_s: float = 1800.0,
) -> Report:
    """Compiles and compares.

    Args:   config: a configuration file; settings: "section.field=value". builder: instead of the
            library's step, one with the same arguments (found in `path`).
    Raises: as `compile_job`; ValueError for a wrong setting.
    """
    experiment = overrides.override(overrides.load(config), list(settings))
    job = aot.Job(
        builder=builder,
        target=target,
        kwargs={"config": config, "settings": list(settings)},
        path=path,
        timeout_s=timeout_s,
    )
    compiled = aot.compile_job(job)
    expected = step.expected_sites(experiment.quant, experiment.model)
    sites = survival(compiled.written, compiled.hlo, expected)
    return Report(target=target, sites=sites, compiled=compiled)


def table(reports: Sequence[Report]) -> str:
    """Sites in rows; what is missing, memory and times below."""
    rows = [("target", "layers", "site", "written", "alive", "verdict")]
    for report in reports:
        for found in report.sites:
            counts = (str(found.written.total()), str(found.alive.total()))
            rows.append((report.target, *found.site, *counts, found.verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for report in reports:
        for found in report.sites:
            if found.written and not found.kept:
                gone = ", ".join(f"{n} of {what!r}" for what, n in sorted(found.missing.items()))
                lines.append(f"{report.target} {' '.join(found.site)}: gone are {gone}")
            elif not found.kept:
                lines.append(f"{report.target} {' '.join(found.site)}: no scope names it")
    for report in reports:
        done = report.compiled
        sizes = {name: f"{size / _MIB:.1f} MiB" for name, size in done.memory.items()}
        memory = ", ".join(f"{name} {size}" for name, size in sizes.items())
        times = f"traced in {done.lower_s:.1f} s, compiled in {done.compile_s:.1f} s"
        lines.append(f"{report.target}: {times}; on the device: {memory}")
    return "\n".join(lines)

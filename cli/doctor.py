"""`doctor`: examines a source step by step. Exit code 0 if no step failed, otherwise that of the first failure: 4 the
source refused, 3 the data is damaged or belongs to another bucket, 2 settings, 1 other causes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import typer

from cli import options, output
from cli.exits import CommandEnded
from mirror import client, units
from mirror.config import required_source
from mirror.inspection.doctor import Finding, StepVerdict, examine
from mirror.messages import GetStatus
from mirror.supervise.setup import checked

COLOURS = {StepVerdict.OK: "green", StepVerdict.WARN: "yellow", StepVerdict.FAIL: "red"}


def doctor(
    source: options.SourceOption = None,
    data: options.DataOption = None,
    config: options.ConfigOption = None,
    pairs: options.SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Examine a source step by step: DNS, TLS, login, privileges and features. With --data, also examine whether the
    mirror can resume there. Each failure comes with a remedy. Changes nothing.
    """
    loaded = options.settings_from({"data": data, "source": source}, config=config, pairs=pairs)
    settings = options.with_source(loaded)
    url = required_source(settings)
    options.quiet_logs(settings)
    answer = None if settings.data is None else client.ask(settings.data, GetStatus())
    status = None if answer is None else answer["status"]
    steps = examine(settings, url, settings.data, check_data=checked, status=status)
    findings = asyncio.run(examined(steps, shown=not as_json))
    failed = [finding for finding in findings if finding.verdict is StepVerdict.FAIL]
    if as_json:
        output.print_json(
            {
                "source": url,
                "data": None if settings.data is None else str(settings.data),
                "service": "down" if answer is None else "up",
                "ok": not failed,
                "findings": [finding_object(finding) for finding in findings],
            }
        )
    if failed:
        raise CommandEnded(int(failed[0].exit_code))


async def examined(findings: AsyncIterator[Finding], *, shown: bool = True) -> list[Finding]:
    """Return the findings; print each as it is found if they are `shown`."""
    found = []
    async for finding in findings:
        found.append(finding)
        if shown:
            say(finding)
    return found


def finding_object(finding: Finding) -> dict[str, str | None]:
    return {
        "step": finding.step,
        "verdict": str(finding.verdict),
        "text": finding.text,
        "remedy": finding.remedy or None,
    }


def say(finding: Finding) -> None:
    remedy = f" ({finding.remedy})" if finding.remedy else ""
    verdict = typer.style(
        f"{finding.verdict:<4}", fg=COLOURS[finding.verdict], bold=finding.verdict is not StepVerdict.OK
    )
    typer.echo(f"{verdict}  {finding.step:<11} {units.printable(f'{finding.text}{remedy}')}")

"""Tasks on processes of this machine and on Spark's executors: the same results, and the same errors."""

from __future__ import annotations

import os

import pytest
from pyspark.sql import SparkSession

from mirror.errors import ConfigError, ConnectFailed, MirrorError
from mirror.spark.runner import LocalRunner, SparkRunner, _begin, _Guarded, as_text, error_of
from storage.errors import CorruptedError


def double(number: int) -> tuple[int, int]:
    return number * 2, os.getpid()


def refuse(number: int) -> int:
    if number == 3:
        raise CorruptedError("three is damaged", path="/x", hint="fix it")
    return number


def die(number: int) -> int:
    os._exit(number)


def lose(number: int) -> int:
    raise ConnectFailed(f"no answer from {number}")


def test_results_come_in_the_order_of_the_tasks_from_several_processes() -> None:
    seen: list[tuple[int, int]] = []
    results = LocalRunner(2).run(double, range(20), lambda done, of: seen.append((done, of)))
    assert [number for number, _ in results] == [2 * number for number in range(20)]
    assert os.getpid() not in {pid for _, pid in results}
    assert seen == [(done, 20) for done in range(1, 21)]


def test_a_runner_of_one_process_uses_the_current_process() -> None:
    seen: list[tuple[int, int]] = []
    assert LocalRunner(1).run(double, [1, 2], lambda done, of: seen.append((done, of)))[1] == (4, os.getpid())
    assert seen == [(1, 2), (2, 2)]


def test_a_run_ends_with_the_error_of_its_task() -> None:
    with pytest.raises(CorruptedError, match=r"/x: three is damaged \(fix it\)"):
        LocalRunner(2).run(refuse, range(10))


def test_a_process_that_dies_ends_the_run_with_a_clear_error() -> None:
    with pytest.raises(MirrorError, match="a process of this job died"):
        LocalRunner(2).run(die, [1, 2])


def test_a_process_whose_parent_died_before_it_was_ready_does_not_stay() -> None:
    pid = os.fork()
    if pid == 0:
        _begin(os.getpid(), None)  # not its parent's process id
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_permanent_error_is_returned_and_a_retryable_one_is_raised() -> None:
    result, error = _Guarded(refuse)(3)
    assert result is None
    assert isinstance(error, CorruptedError)
    with pytest.raises(RuntimeError) as raised:
        _Guarded(lose)(7)
    found = error_of(ValueError(f"Job aborted:\n Traceback ...\n RuntimeError: {raised.value}\n at java.lang"))
    assert isinstance(found, ConnectFailed)
    assert found.what == "no answer from 7"
    assert found.hint == ConnectFailed.default_hint


def test_an_error_as_text_keeps_its_message_hint_and_code() -> None:
    found = error_of(RuntimeError(as_text(ConfigError("bad", hint="fix it"))))
    assert isinstance(found, ConfigError)
    assert (str(found), found.exit_code) == ("bad (fix it)", 2)


def test_an_executor_without_the_package_is_reported_in_one_line() -> None:
    text = "Job aborted\n  File ...\nModuleNotFoundError: No module named 'mirror'\n"
    assert str(error_of(RuntimeError(text))).startswith(
        "the Python of an executor has no package mirror (pip install 'dcp-mirror[spark]' on every executor"
    )


def test_an_error_of_spark_is_reported_in_one_line() -> None:
    found = error_of(RuntimeError("\n[SOME_CLASS] It went wrong.\n at java.lang.Thread\n"))
    assert str(found).startswith("Spark: [SOME_CLASS] It went wrong. (")


def test_results_from_spark_come_in_the_order_of_the_tasks(spark: SparkSession) -> None:
    seen: list[tuple[int, int]] = []
    results = SparkRunner(spark).run(double, range(8), lambda done, of: seen.append((done, of)))
    assert [number for number, _ in results] == [2 * number for number in range(8)]
    assert os.getpid() not in {pid for _, pid in results}
    assert seen[-1] == (8, 8)
    assert SparkRunner(spark).run(double, []) == []


def test_a_run_on_spark_ends_with_the_error_of_its_task(spark: SparkSession) -> None:
    with pytest.raises(CorruptedError, match=r"/x: three is damaged \(fix it\)"):
        SparkRunner(spark).run(refuse, range(4))
    with pytest.raises(ConnectFailed, match="no answer from 7"):
        SparkRunner(spark).run(lose, [7])

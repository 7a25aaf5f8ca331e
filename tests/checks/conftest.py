"""The order of the checks: what takes longest comes first, so that no process ends with it while the others idle."""

import pytest

LONGEST = (
    "test_the_site_is_built_without_a_warning",
    "test_the_cells_run",
    "test_no_local_user_gets_a_message_of_a_site",
    "test_a_run_in_which_one_client_sends_garbage_is_the_run_without_that_client",
    "test_a_deployment_gives_the_weights_and_bytes_of_a_simulation",
    "test_the_wheel_works_outside_of_the_checkout",
    "test_a_simulation_on_flower_stays_on_this_machine",
    "test_clients_that_raise_sleep_or_die_are_left_out",
    "test_the_command_runs_it_and_says_what_lacks",
)
"""Tests of more than half a minute, the longest first."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin the equal parts that pytest-xdist gives its processes with the longest checks, dealt out in turn."""
    number = getattr(config, "workerinput", {}).get("workercount", 1)
    names = {name: place for place, name in enumerate(LONGEST)}
    longest = sorted((i for i in items if _name(i) in names), key=lambda item: names[_name(item)])
    rest = [item for item in items if _name(item) not in names]
    ordered: list[pytest.Item] = []
    for one in range(number):
        part = longest[one::number]
        more = (len(items) - len(ordered)) // (number - one) - len(part)
        ordered += part + rest[:more]
        rest = rest[more:]
    items[:] = ordered


def _name(item: pytest.Item) -> str:
    return item.name.partition("[")[0]
